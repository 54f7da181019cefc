"""A scene as it is played: the manner that won the race, its replays as planned, and the capacity that they confirm.

The race and the replays that judge its winner have different seeds: else the winner would be judged by its luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvantile_optimizer.rehearsal import capacity, choice, predictions
from kvantile_optimizer.rehearsal.capacity import Capacity
from kvantile_optimizer.rehearsal.scene import Manner, Scene, Take

SEED_STEP = 1_000
"""From the seeds of races to those of the replays that judge; no race has so many heats."""
MOST_SEEDS = 20
"""For predictions: near saturation each long queue is news, and no number of seeds would be enough."""


@dataclass(frozen=True, slots=True, eq=False)
class Performance:
    """A scene, played."""

    scene: Scene
    manners: list[Manner]
    """What might have been chosen."""
    manner: Manner
    takes: list[Take]
    """As planned, one for each seed from `seed` on; `capacity.SEEDS` at least, or as many as show that it misses."""
    seed: int
    """Of the first replay that judges."""


def play(
    scene: Scene,
    reservation: str,
    order: str,
    seed: int,
    left_s: Callable[[], float],
    race_until_s: float,
    confirmed: Manner | None = None,
) -> Performance | None:
    """Plays `scene` in the best manner that `reservation` and `order` leave; None when time was up.

    The race ends when no more than `race_until_s` is left; without a single heat the preferred manner wins. Where the
    winner does not hold, the one that the capacity was `confirmed` with is kept.
    """
    manners = choice.candidates(scene, reservation, order)
    manner = choice.race(scene.let_in, manners, seed, lambda: left_s() - race_until_s) or confirmed or manners[0]
    played = _taken(scene, manners, manner, seed, left_s)
    if played is None or confirmed is None or confirmed == manner or capacity.Jury.of(scene).holds(played.takes):
        return played
    return _taken(scene, manners, confirmed, seed, left_s) or played


def preferred(scene: Scene, reservation: str, order: str, seed: int, left_s: Callable[[], float]) -> Performance | None:
    """The scene in the manner that comes first of those that `reservation` and `order` leave; None when time was up."""
    manners, jury = choice.candidates(scene, reservation, order), capacity.Jury.of(scene)

    def is_over(takes: list[Take]) -> bool:
        # A seed that misses settles that the planned replicas do not hold; a spread takes two.
        return len(takes) > 1 and any((jury.missed(take) > jury.allowed).any() for take in takes)

    return _taken(scene, manners, manners[0], seed, left_s, is_over)


def _taken(
    scene: Scene,
    manners: list[Manner],
    manner: Manner,
    seed: int,
    left_s: Callable[[], float],
    is_over: Callable[[list[Take]], bool] = lambda _: False,
) -> Performance | None:
    takes: list[Take] = []
    for place in range(capacity.SEEDS):
        if left_s() <= 0:
            return None
        if not is_over(takes):
            takes.append(scene.replay(manner, seed + SEED_STEP + place))
    return Performance(scene, manners, manner, takes, seed + SEED_STEP)


def confirm(played: Performance, left_s: Callable[[], float]) -> tuple[Capacity, Manner]:
    """The capacity of a scene in the manner that it was played in, or in one that is better where that one ends."""
    scene, seed = played.scene, played.seed
    found = capacity.find(scene, played.manner, seed, played.takes, left_s)
    if found.replicas is None:
        return found, played.manner
    # What suits the planned load may not suit a fuller memory. Form and phi matter most: the reservation stays.
    reserve = played.manner.reserve if any(played.manner.reserve) else played.manners[0].reserve
    rivals = [manner for manner in played.manners if manner.form == "none" or manner.reserve == reserve]
    speed = found.speed * capacity.PRECISION
    rival = choice.race(scene, rivals, seed - SEED_STEP, left_s, replicas=found.replicas, speed=speed)
    if rival is None or rival == played.manner:
        return found, played.manner
    raised = capacity.raised(scene, rival, seed, found, left_s)
    return (found, played.manner) if raised == found else (raised, rival)


def steady(played: Performance, left_s: Callable[[], float]) -> None:
    """Adds replays as planned until the predictions are steady, or as many as it makes sense to have."""
    takes = played.takes
    while left_s() > 0 and len(takes) < MOST_SEEDS and not predictions.are_steady(played.scene, takes):
        takes.append(played.scene.replay(played.manner, played.seed + len(takes)))
