"""The order in which groups hand over: free where it can be, the cheapest found where it cannot, always to the end."""

from __future__ import annotations

import pytest

from kvantile_optimizer import handover
from kvantile_optimizer.handover import Move, Part, Room


def make_part(name: str, running: int, target: int, *classes: str, gpus: int = 1, pool: str = "p") -> Part:
    return Part(name, "target" if target else "running", pool, gpus, gpus, running, target, dict.fromkeys(classes, 1.0))


def named(parts: list[Part], moves: list[Move]) -> list[str]:
    return [("+" if move.starts else "-") + parts[move.part].name for move in moves]


def test_a_small_group_makes_room_before_a_large_one_takes_it() -> None:
    # Of five GPUs one is free: only a fits beside the old, and A leaves room for b.
    parts = [
        make_part("A", 1, 0, "a", gpus=2),
        make_part("a", 0, 1, "a", gpus=1),
        make_part("B", 1, 0, "b", gpus=2),
        make_part("b", 0, 1, "b", gpus=2),
    ]
    assert named(parts, handover.order(parts, Room({"p": 5}), {"a": 1.0, "b": 1.0})) == ["+a", "-A", "+b", "-B"]


def test_a_group_that_nobody_needs_goes_first() -> None:
    parts = [make_part("x", 1, 1, "a"), make_part("y", 1, 0, "a"), make_part("z", 0, 1, "a")]
    assert named(parts, handover.order(parts, Room({}), {"a": 1.0})) == ["-y", "+z"]


@pytest.mark.parametrize("count", [1, 40])
def test_full_pools_interrupt_each_class_once_and_for_one_move(count: int) -> None:
    # Forty independent pools have more orders than are looked at.
    parts = [
        part
        for number in range(count)
        for part in (
            make_part(f"old{number}", 1, 0, f"c{number}", pool=f"p{number}"),
            make_part(f"new{number}", 0, 1, f"c{number}", pool=f"p{number}"),
        )
    ]
    rates = {f"c{number}": 1.0 + number % 3 for number in range(count)}
    moves = handover.order(parts, Room({f"p{number}": 1 for number in range(count)}), rates)
    steps = named(parts, moves)
    assert sorted(steps) == sorted(f"{sign}{part.name}" for part in parts for sign in ("+" if part.comes else "-"))
    for number in range(count):
        assert steps.index(f"+new{number}") == steps.index(f"-old{number}") + 1


def test_room_counts_nodes_for_replicas_of_several_gpus() -> None:
    parts = [make_part("large", 0, 2, gpus=4), make_part("small", 0, 3)]
    room = Room({"p": 11}, {"p": 8})
    assert room.lacking("p", parts, [2, 3]) is None
    assert room.lacking("p", parts, [1, 7]) is None
    assert room.lacking("p", parts, [2, 4]) == 1
    assert Room({"p": 11}, {"p": 4}).lacking("p", parts, [3, 0]) == 1
    assert Room({"p": 12}, {"p": 6}).lacking("p", parts, [3, 0]) == 4
    assert Room({"p": None}).lacking("p", parts, [9, 9]) is None


def test_a_target_that_never_fits_has_no_order() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        handover.order([make_part("x", 0, 1, gpus=2)], Room({"p": 1}), {})
