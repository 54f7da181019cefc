"""vLLM's waiting queue in slack order: `waiting.WaitingQueue` behind the interface that its scheduler expects.

Under vLLM's `priority` policy each priority has a line of its own, and a smaller one always comes before a larger one.
Requests that the scheduler takes out and puts back (a LoRA that has no place yet) keep their place: it depends on when
they came and what they were promised, both of which their account keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from kvantile_engine.plugin.ledger import Account
from kvantile_optimizer.waiting import Order, Ticket, WaitingQueue


class SlackQueue(RequestQueue):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """`account_of` finds or opens a request's account; `now_s` is the engine's clock, as the step sees it.

    `on_peek` is told of every look at the foremost request: vLLM looks before it lets one in.
    """

    def __init__(
        self,
        order: Order,
        account_of: Callable[[Request], Account],
        now_s: Callable[[], float],
        *,
        by_priority: bool,
        on_peek: Callable[[], None],
    ) -> None:
        self._order = order
        self._account_of = account_of
        self._now_s = now_s
        self._by_priority = by_priority
        self._on_peek = on_peek
        self._lines: dict[int, WaitingQueue[Request]] = {}
        self._priorities: list[int] = []
        self._tickets: dict[Request, tuple[int, Ticket[Request]]] = {}

    def add_request(self, request: Request) -> None:
        """Puts a request in its place."""
        account = self._account_of(request)
        priority = request.priority if self._by_priority else 0
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = WaitingQueue(self._order)
            heapq.heappush(self._priorities, priority)
        preempted = request.status == RequestStatus.PREEMPTED
        self._tickets[request] = (
            priority,
            line.push(request, account.arrival_s, account.latest_start_s, preempted=preempted),
        )

    def peek_request(self) -> Request:
        """Whose turn it is. Raises IndexError when nobody waits."""
        self._on_peek()
        ticket = self._foremost().peek(self._now_s())
        assert ticket is not None  # noqa: S101 - a line that is not empty has a first
        return ticket.item

    def pop_request(self) -> Request:
        """Takes out whoever `peek_request` would show. Raises IndexError when nobody waits."""
        request = self._foremost().pop(self._now_s())
        assert request is not None  # noqa: S101 - a line that is not empty has a first
        del self._tickets[request]
        return request

    def prepend_request(self, request: Request) -> None:
        """The same as `add_request`: a place does not depend on who puts the request there."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Each in its place."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        """Takes a request out wherever it stands; harmless when it does not."""
        if request in self._tickets:
            priority, ticket = self._tickets.pop(request)
            self._lines[priority].remove(ticket)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Takes several out."""
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        """In no order that means anything."""
        return iter(list(self._tickets))

    def _foremost(self) -> WaitingQueue[Request]:
        while self._priorities:
            line = self._lines[self._priorities[0]]
            if len(line):
                return line
            del self._lines[heapq.heappop(self._priorities)]
        raise IndexError("nobody waits")
