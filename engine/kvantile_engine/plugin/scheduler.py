"""vLLM's scheduler with admission by reservation, for `--scheduler-cls kvantile_engine.ReservationScheduler`.

vLLM decides everything as it would, at two places it asks us first: who in the waiting queue is next (`SlackQueue`),
and whether that one may have its first blocks (`_gate`, before `allocate_slots`). The ledger hears of preemptions and
ends through two more methods. Nothing of vLLM is patched: the queue and the gate are put in place of this instance's
own, the gate only while vLLM goes through the waiting queue.

What was let in is not asked again: a request that holds blocks (its KV was loaded by a connector) passes, or it could
wait for others that wait for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from kvantile_engine.plugin import versions
from kvantile_engine.plugin.defaults import DefaultsFile
from kvantile_engine.plugin.ledger import Account, Ledger, Room
from kvantile_engine.plugin.metrics import Metrics, Tallies
from kvantile_engine.plugin.pages import Group, Kind, Pages, pages_of
from kvantile_engine.plugin.queue import SlackQueue
from kvantile_engine.plugin.settings import Settings
from kvantile_optimizer import hint as hints
from kvantile_optimizer.admission import NONE, blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvantile")

WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
STEP_WEIGHT = 0.05
"""Of a new step in the mean duration of one: twenty steps or half a second, in which single long ones do not show."""
MOST_CLASSES = 1000
"""Names that have a series of their own in the metrics: as many classes as a plan may have."""
OTHER = "other"


class _Reserving(Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What both kinds of scheduler have of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.of(os.environ)
        self._is_stock = _runs_as_stock(settings)
        if self._is_stock:
            return
        self._tallies = Tallies()
        self._accounts: dict[str, Account] = {}
        self._classes: set[str] = set()
        self._step_s = 0.0
        self._is_behind = False
        self._now_s = self._clock()
        self._defaults = DefaultsFile(settings.defaults, self._clock)
        self._defaults.load()
        # Slots that a running request asks for beyond its tokens, in which drafts are tried.
        self._drafts = self.num_spec_tokens + self.num_lookahead_tokens
        manager = self.kv_cache_manager
        self._pages = _pages(self.kv_cache_config, self.max_num_scheduled_tokens)
        if self._pages is not None:
            # One block is vLLM's own: it stands for what needs none.
            rows = (manager.block_pool.num_gpu_blocks - 1) // self._pages.blocks_per_row
            lead = self._pages.lead
            self._ledger = Ledger(rows, lead.kind.block_size, blocks_for(manager.watermark_blocks, lead.copies))
            others = [
                (Ledger(rows, group.kind.block_size, swing=group.kind.swing), group) for group in self._pages.others
            ]
            self._ledgers = [(self._ledger, lead), *others]
            self._allocate = manager.allocate_slots
        else:
            log.warning("no KV cache group of this model grows with the answer: requests are ordered, not reserved for")
            self._ledger, self._ledgers = Ledger(1 << 40, 1), []
        self.waiting = self._queue(settings)
        if hasattr(self, "skipped_waiting"):
            # Up to 0.30 whoever had to be passed over waits in a queue of its own, and is let in from there.
            self.skipped_waiting = self._queue(settings)
        model = self.vllm_config.model_config.served_model_name
        parallel = self.vllm_config.parallel_config
        self._metrics = Metrics(model if isinstance(model, str) else model[0], parallel.data_parallel_index)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            log.warning("PROMETHEUS_MULTIPROC_DIR is not set: reservations are kept, but /metrics will not show them")
        log.info("reservations are kept: %s, order %s", self._pages, settings.order)

    def _queue(self, settings: Settings) -> SlackQueue:
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        return SlackQueue(
            settings.order, self._account, lambda: self._now_s, by_priority=by_priority, on_peek=self._open_gate
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM, with the time at which it is asked."""
        if self._is_stock:
            return super().schedule(*args, **kwargs)
        now_s = self._clock()
        if self.running:
            self._step_s += STEP_WEIGHT * (now_s - self._now_s - self._step_s)
        self._now_s = now_s
        self._is_behind = True
        self._defaults.follow()
        output = super().schedule(*args, **kwargs)
        if self._pages is not None:
            self.kv_cache_manager.allocate_slots = self._allocate
        # An engine that has become idle takes no further step: what is shown then is shown for long.
        if not self.running or self._metrics.is_due(now_s):
            self._catch_up()
            self._tallies.broken_defaults = self._defaults.faults
            firm = sum(group.copies * book.firm for book, group in self._ledgers)
            soft = sum(group.copies * book.soft_blocks for book, group in self._ledgers)
            self._metrics.show(firm, soft, self._ledger.overshoots, self._tallies, now_s)
        return output

    def _open_gate(self) -> None:
        """From the first look at the waiting queue to the end of the step: only who waits comes to the gate.

        Running requests ask for slots too: standing there all the time it would cost each of them a call in every step.
        """
        if self._pages is not None:
            self.kv_cache_manager.allocate_slots = self._gate

    def _free_request_blocks(self, request: Request) -> None:
        """Preempted, or ended: it has nothing coming now."""
        if not self._is_stock and (account := self._accounts.get(request.request_id)):
            self._leave(account)
        super()._free_request_blocks(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Ended: its account is closed at once, also where a connector keeps its blocks for a while."""
        if not self._is_stock and (account := self._accounts.pop(request.request_id, None)):
            self._leave(account)
        return super()._free_request(request, *args, **kwargs)

    def _clock(self) -> float:
        """The engine's own clock, seconds."""
        return time.monotonic()

    def _prefill_s(self, prompt: int) -> float:
        """How long the first token takes after admission: the steps that the prompt is computed in."""
        return self._step_s * blocks_for(prompt, self.max_num_scheduled_tokens)

    def _account(self, request: Request) -> Account:
        """The request's account, opened when it is first seen."""
        account = self._accounts.get(request.request_id)
        if account is None:
            account = self._accounts[request.request_id] = self._opened(request)
        return account

    def _opened(self, request: Request) -> Account:
        given = request.sampling_params.extra_args if request.sampling_params is not None else None
        asked = hints.parse(given)
        self._tallies.broken_hints += hints.broken(given, asked)
        asked = asked.or_else(self._defaults.current.of(asked.class_name))
        arrival_s, budget_s = self._clock(), asked.ttft_budget_s
        latest_s = None if budget_s is None else arrival_s + budget_s - self._prefill_s(request.num_prompt_tokens)
        return self._ledger.open(
            Account(
                request.request_id,
                prompt=request.num_prompt_tokens + self._drafts,
                form=asked.form,
                reserve=asked.reserve_tokens or 0,
                pooling_per_mille=asked.pooling_per_mille,
                class_name=self._class(asked.class_name or ""),
                arrival_s=arrival_s,
                latest_start_s=latest_s,
                # The view of it that is public takes longer to ask for its length than all else that is done with it.
                answer=getattr(request, "_output_token_ids", request.output_token_ids),
            ),
            request.max_tokens,
        )

    def _class(self, name: str) -> str:
        if name not in self._classes and len(self._classes) >= MOST_CLASSES:
            return OTHER
        self._classes.add(name)
        return name

    def _gate(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """`allocate_slots`, but a request that waits gets its first blocks only if the rule lets it in."""
        if request.status not in WAITING or request.num_computed_tokens > 0:
            return self._allocate(request, *args, **kwargs)
        account, ledger = self._account(request), self._ledger
        # A connector's load that failed has given its blocks back.
        self._leave(account)
        account.generated = len(account.answer)
        # Where nobody has a reservation vLLM decides alone.
        if account.form != NONE or ledger.firm or ledger.soft:
            self._catch_up()
            account.parts = tuple(_part(account, group.kind) for _, group in self._ledgers[1:])
            room = self._room(account, kwargs.get("new_computed_blocks"))
            if not ledger.lets_in(account, room):
                self._tallies.waits["reservation" if ledger.fits(account, room) else "blocks"] += 1
                return None
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is None:
            self._tallies.waits["blocks"] += 1
        else:
            for book, part, group in self._books(account):
                book.join(part, self._blocks_of(group, request.request_id))
        return blocks

    def _leave(self, account: Account) -> None:
        for book, part, _ in self._books(account):
            book.leave(part)

    def _books(self, account: Account) -> Iterator[tuple[Ledger, Account, Group]]:
        """Each ledger with the request's account there; of other groups only once it has asked to be let in."""
        for (book, group), part in zip(self._ledgers, (account, *account.parts), strict=False):
            yield book, part, group

    def _room(self, account: Account, shared: KVCacheBlocks | None) -> Room:
        found = shared.blocks if shared is not None else ()
        # Cached blocks that nobody uses count as free until somebody does.
        kept = sum(block.ref_cnt == 0 and not block.is_null for group in found for block in group)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() - kept
        # Requests whose KV is being loaded do not run yet, but have been promised theirs.
        running = len(self.running) or self._ledger.holding
        (_, _, lead), *others = self._books(account)
        for book, part, group in others:
            free -= group.copies * book.wanted(part, _count(found, group), running)
        return Room(max(free, 0) // lead.copies, _count(found, lead), running)

    def _catch_up(self) -> None:
        """Once in each step in which somebody asks."""
        if self._is_behind:
            self._is_behind = False
            for book, group in self._ledgers:
                book.catch_up(partial(self._blocks_of, group))

    def _blocks_of(self, group: Group, request_id: str) -> int:
        return _count(self.kv_cache_manager.get_blocks(request_id).blocks, group)


class ReservationScheduler(_Reserving, AsyncScheduler):  # type: ignore[misc]  # as above
    """For engines that schedule a step ahead, as vLLM does wherever it can; else it makes the other kind."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The scheduler for how this engine runs."""
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if config.scheduler_config.async_scheduling:
            return super().__new__(cls)
        return _StepwiseScheduler(*args, **kwargs)


class _StepwiseScheduler(_Reserving):
    """For engines that wait for each step's tokens before they schedule the next."""


def _runs_as_stock(settings: Settings) -> bool:
    """Whether this vLLM is to run as if the plug-in were not there. Raises RuntimeError where it is to be refused."""
    found = versions.faults()
    if not found:
        return False
    if settings.unknown_version == "stock":
        for fault in found:
            log.warning("RESERVATIONS ARE NOT KEPT, this is stock vLLM: %s", fault)
        return True
    raise RuntimeError(
        f"{'; '.join(found)}. Use a tested version, or run as stock vLLM with KVANTILE_ENGINE_UNKNOWN_VERSION=stock"
    )


def _pages(config: Any, most_scheduled: int) -> Pages | None:
    """How the model's groups count; None where none grows with the answer."""
    # Layers of one type may come bundled.
    specs = (group.kv_cache_spec for group in config.kv_cache_groups)
    return pages_of(
        _kind(next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec), most_scheduled) for spec in specs
    )


def _kind(spec: Any, most_scheduled: int) -> Kind:
    size = spec.block_size
    if isinstance(spec, FullAttentionSpec):
        return Kind(size)
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if not window:
        # A state or an encoder's output has a block or two, whatever the answer's length.
        return Kind(size, 1, 1)
    # One more, for a window rarely begins where a block does.
    return Kind(size, blocks_for(window - 1 + most_scheduled, size) + 1, blocks_for(window, size) + 1)


def _part(account: Account, kind: Kind) -> Account:
    """The request's account in the ledger of another group."""
    prompt, reserve = kind.lengths(account.prompt, account.generated, account.reserve)
    phi, name = account.pooling_per_mille, account.class_name
    part = Account(account.request_id, prompt, account.form, reserve, phi, name, answer=account.answer)
    part.generated = account.generated
    return part


def _count(blocks: Sequence[Sequence[Any]], group: Group) -> int:
    """The blocks of one group of a kind; those that a window has left behind are none."""
    if not blocks:
        return 0
    listed = blocks[group.place]
    return len(listed) if group.kind.most_prompt_blocks is None else sum(not block.is_null for block in listed)
