"""The simulated gateway against the real one: placement and lobby before replicas of the emulator, in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np
import pytest

from kvantile_engine.emulator.scheduler import Limits, Scheduler, Sequence, State
from kvantile_engine.emulator.steptime import StepTime as EngineStepTime
from kvantile_optimizer.admission import HELD, NONE, PER_MILLE, POOLED
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Group, Plan
from kvantile_optimizer.simulator import rows
from kvantile_optimizer.simulator.fleet import simulate_plan
from kvantile_optimizer.simulator.lobby import Lobby, key_bytes, replica_url
from kvantile_optimizer.simulator.replica import Policy, Requests
from kvantile_optimizer.simulator.state import Ints
from kvantile_optimizer.traces import HashIds
from kvantile_router import lobby as router_lobby
from kvantile_router.clock import Clock
from kvantile_router.errors import FullError
from kvantile_router.fleet import Address, Fleet, Replica
from kvantile_router.placement import Lease, Placement, Wanted
from kvantile_router.reserve import Size, hint_for
from kvantile_router.table import Table
from tests.support.small_plan import make_group, make_plan, make_route
from tests.unit.simulator.cases import PromptCaching

BLOCK = 16
PREFIXES = 3
CASES = 24


class VirtualSelector(selectors.SelectSelector):
    """Waiting takes no time and moves the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the selector's."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now_s


class LoopClock(Clock):
    """Plan seconds that are the loop's."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


async def until(moment: float) -> None:
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(moment, reached.set_result, None)
    await reached


@dataclass(frozen=True, slots=True)
class Case:
    plan: Plan
    requests: Requests
    classes: Ints
    lobby: Lobby
    seed: int


def make_case(seed: int) -> Case:
    """Two classes on two small groups, with more requests than fit at times; most begin like others."""
    rng = np.random.default_rng(seed)
    groups = [
        make_group("a", replicas=2, kv_tokens=int(rng.integers(600, 1200))),
        make_group("b", replicas=int(rng.integers(1, 3)), kv_tokens=int(rng.integers(900, 2000))),
    ]
    orders = [str(rng.choice(["slack", "fcfs"])) for _ in range(2)]
    form = str(rng.choice(["none", "held", "pooled"]))
    routes = [
        make_route(name, group, reserve=int(rng.integers(20, 120))).model_copy(
            update={"fraction": share, "form": form, "order": order}
        )
        for name, order in zip(("chat", "code"), orders, strict=True)
        for group, share in (("a", 0.4), ("b", 0.6))
    ]
    plan = make_plan(*groups, ttft_seconds=float(rng.uniform(1.0, 4.0))).model_copy(update={"routes": routes})
    count = 60
    prompt, output = rng.integers(BLOCK + 1, 300, count), rng.integers(1, 150, count)
    stretches = -(-prompt // BLOCK)
    begin = np.cumsum(stretches) - stretches
    ids = np.arange(stretches.sum()) + PREFIXES
    ids[begin] = rng.integers(PREFIXES, size=count)
    requests = Requests(
        np.cumsum(rng.exponential(0.08, count)),
        prompt,
        output,
        max_tokens=output,
        cached=np.where(rng.random(count) < 0.7, BLOCK, 0),
        hash_ids=HashIds(ids, begin, stretches, BLOCK),
    )
    return Case(plan, requests, rng.integers(0, 2, count), Lobby(int(rng.integers(2, 12))), seed)


@dataclass(eq=False)
class Machine:
    """A replica of the emulator, and those it serves."""

    group: Group
    lobby: router_lobby.Lobby
    scheduler: Scheduler
    work: asyncio.Event = field(default_factory=asyncio.Event)
    leases: dict[Sequence, Lease] = field(default_factory=dict)
    first_s: dict[Sequence, float] = field(default_factory=dict)
    last_s: dict[Sequence, asyncio.Future[float]] = field(default_factory=dict)
    together: bool = False
    """Whether two answers ever ended in one step: the simulator releases those at once, the gateway in turn."""

    def submit(self, sequence: Sequence, lease: Lease) -> asyncio.Future[float]:
        """When the answer will have ended."""
        self.leases[sequence] = lease
        self.last_s[sequence] = asyncio.get_running_loop().create_future()
        self.scheduler.submit(sequence)
        self.work.set()
        return self.last_s[sequence]

    async def run(self) -> None:
        step_time = self.group.step_time
        seconds = EngineStepTime(step_time.alpha, step_time.beta, step_time.gamma, step_time.delta).seconds
        now_s = 0.0
        while True:
            if not self.scheduler.busy:
                self.work.clear()
                await self.work.wait()
                now_s = max(now_s, asyncio.get_running_loop().time())
            step = self.scheduler.begin(now_s)
            now_s += seconds(len(step.decoding), step.context_tokens, step.prefill_tokens)
            await until(now_s)
            produced = self.scheduler.end(step)
            for sequence in produced:
                if sequence not in self.first_s:
                    self.first_s[sequence] = now_s
                    self.lobby.first_token(self.group.name, now_s - sequence.arrival)
            ended = [sequence for sequence in produced if sequence.state is State.FINISHED]
            self.together |= len(ended) > 1
            for sequence in ended:
                self.last_s[sequence].set_result(now_s)
                self.leases.pop(sequence).release()
            for _ in range(8):  # what was released lets others in before the next step begins
                await asyncio.sleep(0)


class Drawing(Placement):
    """The gateway's placement, drawing for each request what the simulator draws."""

    def __init__(self, table: Table, fleet: Fleet, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        count = len(case.requests)
        self.groups, self.chances = rng.random(count), rng.random(count)
        self.index = {float(arrival): place for place, arrival in enumerate(case.requests.arrival_s)}
        self.drawn: Iterator[float] = iter(())
        super().__init__(table, fleet, lambda: next(self.drawn))

    def place(self, wanted: Wanted, withheld: object = ()) -> Lease | None:
        index = self.index[wanted.arrival_s]
        first = [] if wanted.key is not None else [float(self.groups[index])]
        self.drawn = chain(first, repeat(float(self.chances[index])))
        return super().place(wanted, withheld)  # type: ignore[arg-type]  # passed on


@dataclass(frozen=True, slots=True)
class Answer:
    url: str
    sent_s: float
    first_s: float
    last_s: float


async def served(case: Case) -> tuple[list[Answer | None], bool]:
    """What the real gateway makes of a case, None for refusals; whether answers ever ended together."""
    table, fleet = Table(case.plan), Fleet()
    placement = Drawing(table, fleet, case)
    lobby = router_lobby.Lobby(placement, LoopClock(), case.lobby.queue_length, case.lobby.queue_wait_s)
    fleet.update(
        [Address(group.name, replica_url(group.name, n)) for group in case.plan.groups for n in range(group.replicas)]
    )
    machines: dict[Replica, Machine] = {}
    for replica in fleet:
        fleet.set_ready(replica, ready=True)
        group = table.groups[replica.group]
        limits = Limits(group.kv_tokens // BLOCK, BLOCK, group.max_num_seqs, group.max_num_batched_tokens)
        machines[replica] = Machine(group, lobby, PromptCaching(limits))
    running = [asyncio.create_task(machine.run(), name="machine") for machine in machines.values()]

    async def ask(index: int) -> Answer | None:
        await until(float(case.requests.arrival_s[index]))
        wanted = wanted_of(case, index)
        try:
            lease = await lobby.acquire(wanted)
        except FullError:
            return None
        machine = machines[lease.replica]
        sequence = sequence_of(case, index, lease)
        last_s = await machine.submit(sequence, lease)
        return Answer(lease.replica.url, sequence.arrival, machine.first_s[sequence], last_s)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(index), name=f"request {index}") for index in range(len(case.requests))]
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return [task.result() for task in asked], any(machine.together for machine in machines.values())


def wanted_of(case: Case, index: int) -> Wanted:
    requests = case.requests
    assert requests.hash_ids is not None
    prefix = int(requests.hash_ids.ids[requests.hash_ids.begin[index]])
    return Wanted(
        case.plan.classes[case.classes[index]].name,
        Size(int(requests.prompt[index]), 1, int(requests.output[index])),
        float(requests.arrival_s[index]),
        key_bytes(prefix) if np.asarray(requests.cached)[index] else None,
    )


def sequence_of(case: Case, index: int, lease: Lease) -> Sequence:
    """What the gateway's hint makes an engine do."""
    requests, hash_ids = case.requests, case.requests.hash_ids
    assert hash_ids is not None
    now_s = asyncio.get_running_loop().time()
    prompt, output = int(requests.prompt[index]), int(requests.output[index])
    due_s = float(requests.arrival_s[index]) + case.plan.classes[case.classes[index]].slo.ttft_seconds
    hint = hint_for(lease.route, output, due_s - now_s)
    step = next(group for group in case.plan.groups if group.name == lease.route.group).step_time
    ids = hash_ids.ids[hash_ids.begin[index] :][: prompt // BLOCK]
    return Sequence(
        prompt=prompt,
        output=output,
        max_tokens=output,
        arrival=now_s,
        latest_start=None
        if hint.ttft_budget_s is None
        else now_s + hint.ttft_budget_s - (step.alpha + step.delta * prompt),
        form=NONE if hint.reserve_tokens is None else HELD if hint.pooling is None else POOLED,
        reserve=hint.reserve_tokens or 0,
        pooling_per_mille=PER_MILLE if hint.pooling is None else round(hint.pooling * PER_MILLE),
        hashes=tuple(map(int, ids)),
    )


def test_the_simulated_gateway_does_what_the_real_one_does() -> None:
    compared = refused = waited = 0
    for seed in range(CASES):
        case = make_case(seed)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            answers, together = runner.run(served(case))
        if together:
            continue
        compared += 1
        found = simulate_plan(case.plan, case.requests, case.classes, case.seed, lobby=case.lobby)
        urls = [replica_url(group.name, n) for group in case.plan.groups for n in range(group.replicas)]
        refused += answers.count(None)
        waited += sum(a is not None and a.sent_s > t for a, t in zip(answers, case.requests.arrival_s, strict=True))
        assert [None if r < 0 else urls[r] for r in found.outcome.replica] == [a and a.url for a in answers], seed
        for place, answer in enumerate(answers):
            if answer is not None:
                assert found.outcome.first_s[place] == pytest.approx(answer.first_s, abs=1e-6), (seed, place)
                assert found.outcome.last_s[place] == pytest.approx(answer.last_s, abs=1e-6), (seed, place)
    assert compared > CASES / 4
    assert refused > compared
    assert waited > 5 * compared


def crowd(count: int = 200) -> tuple[Plan, Requests, Ints]:
    """More than one replica takes, all of one class."""
    plan = make_plan(make_group(kv_tokens=1024), ttft_seconds=2.0)
    rng = np.random.default_rng(0)
    requests = Requests(np.linspace(0, 0.1 * count, count), rng.integers(50, 200, count), rng.integers(20, 100, count))
    return plan, requests, np.zeros(count, np.int64)


def test_who_waits_longer_than_the_target_is_refused_and_counted() -> None:
    plan, requests, classes = crowd()
    found = simulate_plan(plan, requests, classes, lobby=Lobby())
    failed = int(rows.plan_row(found)["requestsFailed"] or 0)
    assert failed > 20
    assert (found.group_index[~found.outcome.served] == -1).all()
    patient = simulate_plan(plan, requests, classes, lobby=Lobby(queue_wait_s=1000.0))
    assert patient.outcome.served.all()
    none = simulate_plan(plan, requests, classes, lobby=Lobby(queue_length=0))
    assert int(rows.plan_row(none)["requestsFailed"] or 0) > failed


def test_with_room_for_all_a_lobby_changes_nothing_on_one_replica() -> None:
    plan, requests, classes = crowd(20)
    roomy = plan.model_copy(update={"groups": [make_group(kv_tokens=100_000)]})
    through = simulate_plan(roomy, requests, classes, lobby=Lobby())
    assert through.outcome.last_s.tolist() == simulate_plan(roomy, requests, classes).outcome.last_s.tolist()
    assert through.reserve.tolist() == simulate_plan(roomy, requests, classes).reserve.tolist()


def test_a_class_without_a_route_is_served_by_every_group() -> None:
    plan = make_case(0).plan.model_copy(update={"routes": []})
    _, requests, classes = crowd()
    found = simulate_plan(plan, requests, classes, lobby=Lobby())
    assert set(found.group_index[found.outcome.served]) == {0, 1}


def test_a_group_without_replicas_gets_nothing() -> None:
    plan = make_case(0).plan
    for empty, left in ((0, 1), (1, 0)):
        groups = list(plan.groups)
        groups[empty] = groups[empty].model_copy(update={"replicas": 0})
        _, requests, classes = crowd()
        found = simulate_plan(plan.model_copy(update={"groups": groups}), requests, classes, lobby=Lobby())
        assert found.outcome.served.any()
        assert set(found.group_index[found.outcome.served]) == {left}


def test_a_policy_of_another_engine_knows_no_lobby() -> None:
    with pytest.raises(InputError, match="lobby"):
        simulate_plan(*crowd(), policy=Policy(), lobby=Lobby())
