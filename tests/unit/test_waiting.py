"""The order in which waiting requests are admitted."""

from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer.waiting import WaitingQueue


def drain(queue: WaitingQueue[str], now: float) -> list[str]:
    items = []
    while (item := queue.pop(now)) is not None:
        items.append(item)
    return items


def test_without_deadlines_it_is_first_come_first_served() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for at, name in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        queue.push(name, at)
    assert drain(queue, now=10.0) == ["a", "b", "c"]


def test_the_earliest_deadline_goes_first_and_the_late_go_last() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.push("late", 0.0, latest_start=1.0)
    queue.push("soon", 1.0, latest_start=5.0)
    queue.push("sooner", 2.0, latest_start=4.0)
    assert drain(queue, now=3.0) == ["sooner", "soon", "late"]


def test_a_preempted_request_comes_before_everybody() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.push("urgent", 0.0, latest_start=1.0)
    queue.push("back", 5.0, preempted=True)
    assert drain(queue, now=0.5) == ["back", "urgent"]


def test_deadline_order_does_not_spare_the_late() -> None:
    queue: WaitingQueue[str] = WaitingQueue(order="deadline")
    queue.push("late", 0.0, latest_start=1.0)
    queue.push("soon", 1.0, latest_start=5.0)
    assert drain(queue, now=3.0) == ["late", "soon"]


def test_fcfs_ignores_deadlines() -> None:
    queue: WaitingQueue[str] = WaitingQueue(order="fcfs")
    queue.push("first", 0.0, latest_start=9.0)
    queue.push("second", 1.0, latest_start=2.0)
    assert drain(queue, now=0.0) == ["first", "second"]


def test_the_late_get_one_admission_in_ten_and_never_starve() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for i in range(100):
        queue.push(f"on-time {i}", 1.0, latest_start=100.0 + i)
    for i in range(5):
        queue.push(f"late {i}", 0.0, latest_start=1.0)
    served = drain(queue, now=50.0)
    late_at = [i for i, item in enumerate(served) if item.startswith("late")]
    assert late_at == [9, 19, 29, 39, 49]


def test_a_removed_request_is_never_served() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    gone = queue.push("gone", 0.0)
    queue.push("stays", 1.0)
    queue.remove(gone)
    queue.remove(gone)
    assert len(queue) == 1
    assert drain(queue, now=2.0) == ["stays"]
    assert len(queue) == 0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.none() | st.floats(0, 20), st.booleans()), max_size=40), st.floats(0, 20)
)
def test_peek_shows_what_pop_takes_and_everybody_is_served_once(
    requests: list[tuple[float, float | None, bool]], now: float
) -> None:
    queue: WaitingQueue[int] = WaitingQueue()
    for number, (arrival, latest_start, preempted) in enumerate(requests):
        queue.push(number, arrival, latest_start, preempted=preempted)
    served = []
    while (ticket := queue.peek(now)) is not None:
        item = queue.pop(now)
        assert item == ticket.item
        served.append(item)
    assert sorted(served, key=lambda number: number or 0) == list(range(len(requests)))
