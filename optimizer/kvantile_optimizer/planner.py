"""Makes a plan: pose the problem, solve until the answer holds, replay it, and put it into words.

The closed forms decide first; the replay then says of each group how few replicas would really do, or that more are
needed. Its word is what the program plans with the next time, for that candidate and, as the best guess there is, for
those that were not replayed. Of all plans that were replayed the cheapest one that held is taken. A class that cannot
be served is never an error: the plan says what stands in the way and what would lift it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvantile_optimizer import coefficients, program, remedy
from kvantile_optimizer.assembly import assemble, group_names
from kvantile_optimizer.errors import TimeOverError
from kvantile_optimizer.plan import Plan, Unserved
from kvantile_optimizer.problem import Problem, pose
from kvantile_optimizer.program import Array
from kvantile_optimizer.rehearsal.rehearse import GroupRehearsal, Rehearsal, rehearse
from kvantile_optimizer.settle import GAIN, Method, Settled, prefer_current, settle, shape_of
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.workload import Workload

REHEARSALS = 3
"""Plans that are replayed at most: the closed forms' and two that the replays led to."""
SOLVING_SHARE = 0.5
"""Of the time that is left, for the search of a plan that is to be replayed."""
RATIOS = (0.25, 4.0)
"""Of what a replay may say a replica takes to what the closed forms say: beyond, one of them is mistaken."""
REFUSED = 0.5
"""The ratio where no number of replicas would do, so that the next plan looks elsewhere."""
STANDS = "no other plan was found within the time limit, so the one that runs stands: allow more with --time-limit"
"""The warning of a running plan that is the answer for want of another."""


def make_plan(
    serving_plan: ServingPlan,
    workloads: list[Workload],
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    current: Plan | None = None,
    method: Method = "bcd",
    rehearsed: bool = True,
    like: Plan | None = None,
) -> Plan:
    """Plans `serving_plan` for `workloads`, one for each of its classes in order.

    `method` is block coordinate descent, or the whole program at once, which takes long beyond some twenty classes.
    `current` is the plan that runs: starting replicas costs, and it stays while the gain is below the hysteresis.
    Unless `rehearsed`, the plan is the closed forms' and so are its predictions, but for what the replays of another
    plan, `like` or the running one, have shown. The time limit is for everything together. Raises InputError for a GPU
    or model that nobody knows, WorkError from the solver, TimeOverError when the limit came before any plan; but a plan
    that runs then stands, with the warning `STANDS`.
    """
    started = time.perf_counter()

    def left_s() -> float:
        return started + time_limit_s - time.perf_counter()

    problem = pose(serving_plan, workloads)
    planning = _Planning(problem, coefficients.tables(problem), seed, current, method, left_s)
    ratios = _known_ratios(problem, like or current)
    try:
        plan = _rehearsed(planning, ratios) if rehearsed else planning.plan(*planning.settled(ratios, left_s))
    except TimeOverError:
        if current is None:
            raise
        plan = _standing(current)
    return plan.model_copy(update={"solve_seconds": time.perf_counter() - started})


@dataclass(frozen=True, slots=True)
class _Planning:
    problem: Problem
    tables: coefficients.Tables
    seed: int
    current: Plan | None
    method: Method
    left_s: Callable[[], float]

    def settled(self, ratios: Array, left_s: Callable[[], float]) -> tuple[Settled, list[Unserved]]:
        """The decision where replicas take `ratios` (J,) times what the closed forms allow, and what it leaves out."""
        problem, seed = self.problem, self.seed
        found = settle(problem, self.tables, ratios, left_s, seed, self.current, self.method)
        if self.current is not None and left_s() > 0:
            found = prefer_current(problem, found, self.current, left_s, seed)
        return found, remedy.unserved(problem, self.tables, found.instance, found.decision.unserved, left_s, seed)

    def plan(self, settled: Settled, unserved: list[Unserved]) -> Plan:
        """A decision in the plan's words."""
        return assemble(self.problem, settled, unserved, self.method, self.seed)

    def rehearsal(self, plan: Plan, *, confirm: bool = True) -> Rehearsal:
        """The plan, replayed."""
        engine = self.problem.serving_plan.spec.engine
        return rehearse(
            plan,
            self.problem.workloads,
            reservation=engine.reservation,
            order=engine.order,
            seed=self.seed,
            left_s=self.left_s,
            confirm=confirm,
        )


def _standing(current: Plan) -> Plan:
    """The plan that runs, as the answer."""
    kept = [warning for warning in current.warnings if warning != STANDS]
    return current.model_copy(update={"steps": [], "sensitivities": [], "warnings": [*kept, STANDS]})


def _known_ratios(problem: Problem, known: Plan | None) -> Array:
    """(J,) what a plan's groups were found to take, by shape; for shapes that it has not, the usual of those."""
    if known is None or not known.groups:
        return np.ones(len(problem.candidates))
    ratios = {shape_of(group): group.capacity_ratio for group in known.groups}
    usual = float(np.exp(np.mean(np.log(list(ratios.values())))))
    return np.array([ratios.get(candidate.shape, usual) for candidate in problem.candidates])


@dataclass(frozen=True, slots=True)
class _Confirmed:
    """A plan with as many replicas as its replay asks for."""

    settled: Settled
    unserved: list[Unserved]
    replayed: Plan | None
    """The plan with its replayed predictions, where it had these replicas already."""

    @property
    def rank(self) -> tuple[float, float]:
        """Those that serve more before the cheaper ones."""
        rates = self.settled.instance.rates
        return round(float(self.settled.decision.unserved @ rates), 6), self.settled.decision.objective


def _rehearsed(planning: _Planning, ratios: Array) -> Plan:
    seen, best = np.full(len(ratios), np.nan), None
    for _ in range(REHEARSALS):
        settled, unserved = planning.settled(ratios, _sooner(planning.left_s))
        if best is not None and settled.decision.objective > best.settled.decision.objective * (1 - GAIN):
            break
        plan = planning.plan(settled, unserved)
        found = planning.rehearsal(plan)
        if len(found.groups) < len(plan.groups) or planning.left_s() <= 0:
            return best.replayed if best is not None and best.replayed else found.plan
        confirmed = _confirmed(planning.problem, settled, unserved, found)
        if best is None or confirmed.rank < best.rank:
            best = confirmed
        if confirmed.replayed is not None:
            break
        said = _said(planning.problem, settled, found.groups)
        seen = np.where(np.isnan(said), seen, said)
        ratios = np.where(np.isnan(seen), np.exp(np.nanmean(np.log(seen))), seen)
    if best is None:
        raise TimeOverError("no plan was found within the time limit: allow more with --time-limit")
    return best.replayed or planning.rehearsal(planning.plan(best.settled, best.unserved), confirm=False).plan


def _confirmed(problem: Problem, settled: Settled, unserved: list[Unserved], found: Rehearsal) -> _Confirmed:
    """The decision with the replicas that the replay asks for, as far as the pools have them."""
    decision, needed = settled.decision, settled.decision.replicas.copy()
    for j, name in group_names(problem, decision).items():
        needed[j] = found.groups[name].replicas_needed or needed[j]
    if (needed == decision.replicas).all() or not program.fits(settled.instance, needed):
        return _Confirmed(settled, unserved, found.plan)
    said = _said(problem, settled, found.groups)
    instance = replace(settled.instance, replayed=np.where(np.isnan(said), settled.instance.replayed, said))
    other = replace(settled, instance=instance, decision=program.with_replicas(instance, decision, needed))
    return _Confirmed(other, unserved, None)


def _sooner(left_s: Callable[[], float]) -> Callable[[], float]:
    """A clock that ends when SOLVING_SHARE of the time has passed."""
    kept_s = left_s() * (1 - SOLVING_SHARE)
    return lambda: left_s() - kept_s


def _said(problem: Problem, settled: Settled, groups: dict[str, GroupRehearsal]) -> Array:
    """(J,) what the replay lets a replica of each group take over what the closed forms do; NaN for what it has not
    replayed."""
    instance = replace(settled.instance, replayed=np.ones(len(problem.candidates)))
    use = program.uses(instance, instance.columns) * settled.decision.fractions
    formal = np.array([np.bincount(instance.columns.candidate, row, len(problem.candidates)) for row in use]).max(
        axis=0
    )
    busy = program.busy_replicas(instance, settled.decision)
    said = np.full(len(problem.candidates), np.nan)
    for j, name in group_names(problem, settled.decision).items():
        found = groups.get(name)
        if found is None or busy[j] <= 0:
            continue
        if found.confirmed_utilisation:
            said[j] = np.clip(formal[j] * found.confirmed_utilisation / busy[j], *RATIOS)
        elif not found.holds:
            said[j] = REFUSED * instance.replayed[j]
    return said
