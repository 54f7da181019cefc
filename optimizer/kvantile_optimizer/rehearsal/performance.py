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
    """As planned, one for each seed from `seed` on; at least `capacity.SEEDS`."""
    seed: int
    """Of the first replay that judges."""


def play(
    scene: Scene, reservation: str, order: str, seed: int, left_s: Callable[[], float], race_until_s: float
) -> Performance | None:
    """Plays `scene` in the best manner that `reservation` and `order` leave; None when time was up.

    The race ends when no more than `race_until_s` is left; without a single heat the preferred manner wins.
    """
    manners = choice.candidates(scene, reservation, order)
    manner = choice.race(scene, manners, seed, lambda: left_s() - race_until_s) or manners[0]
    takes: list[Take] = []
    for place in range(capacity.SEEDS):
        if left_s() <= 0:
            return None
        takes.append(scene.replay(manner, seed + SEED_STEP + place))
    return Performance(scene, manners, manner, takes, seed + SEED_STEP)


def confirm(played: Performance, left_s: Callable[[], float]) -> Capacity:
    """The capacity of a scene in the manner that was chosen, or in one that is better where that one ends."""
    scene, seed = played.scene, played.seed
    found = capacity.find(scene, played.manner, seed, played.takes, left_s)
    if found.replicas is None:
        return found
    # What suits the planned load may not suit a fuller memory. Form and phi matter most: the reservation stays.
    reserve = played.manner.reserve if any(played.manner.reserve) else played.manners[0].reserve
    rivals = [manner for manner in played.manners if manner.form == "none" or manner.reserve == reserve]
    speed = found.speed * capacity.PRECISION
    rival = choice.race(scene, rivals, seed - SEED_STEP, left_s, replicas=found.replicas, speed=speed)
    return capacity.raised(scene, rival, seed, found, left_s) if rival and rival != played.manner else found


def steady(played: Performance, left_s: Callable[[], float]) -> None:
    """Adds replays as planned until the predictions are steady, or as many as it makes sense to have."""
    takes = played.takes
    while left_s() > 0 and len(takes) < MOST_SEEDS and not predictions.are_steady(played.scene, takes):
        takes.append(played.scene.replay(played.manner, played.seed + len(takes)))
