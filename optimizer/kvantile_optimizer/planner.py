"""Makes a plan: pose the problem, solve until the answer holds, replay it, and put it into words.

The closed forms decide first; the replay then says of each group how few replicas would really do, or that more are
needed. Its word is what the program plans with the next time, for that candidate and, as the best guess there is, for
those that were not replayed. Of all plans that were replayed the cheapest one that held is taken. A class that cannot
be served is never an error: the plan says what stands in the way and what would lift it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvantile_optimizer import canonical, coefficients, program, remedy
from kvantile_optimizer.assembly import assemble, group_names
from kvantile_optimizer.candidates import shape_of
from kvantile_optimizer.errors import InputError, TimeOverError, WorkError
from kvantile_optimizer.plan import Plan, Unserved
from kvantile_optimizer.problem import Problem, capacities, first_guess, pose
from kvantile_optimizer.program import Array, Decision
from kvantile_optimizer.rehearsal.rehearse import GroupRehearsal, judge, rehearse
from kvantile_optimizer.settle import GAIN, SLACK, Method, Settled, prefer_current, settle
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.workload import Workload

REHEARSALS = 3
"""Plans that are replayed at most: the closed forms' and two that the replays led to."""
JUDGING_SHARE = 0.7
"""Of the time, for finding the plan: a choice and predictions for the one that stays take about as much as judging
one plan, and there are seldom more than two."""
SOLVING_SHARE = 0.5
"""Of the time that is left for that, for the search of the next plan that is to be replayed."""
RATIOS = (0.25, 4.0)
"""Of what a replay may say a replica takes to what the closed forms say: beyond, one of them is mistaken."""
DOUBTS, LESS = 6, 0.9
"""How often, and to what share of the load, a group is held down that did not hold where a plan is to have the same
replicas again, each with a little less: seven loads of which the last is half of the first."""
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
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """Plans `serving_plan` for `workloads`, one for each of its classes in order.

    `method` is block coordinate descent, or the whole program at once, which takes long beyond some twenty classes.
    `current` is the plan that runs: starting replicas costs, and it stays while the gain is below the hysteresis.
    Unless `rehearsed`, the plan is the closed forms' and so are its predictions, but for what the replays of another
    plan, `like` or the running one, have shown. The time limit is for everything together, by `clock` in seconds; where
    it ends before a plan was replayed, the plan says so. Raises InputError for a GPU or model that nobody knows,
    WorkError from the solver, TimeOverError when the limit came before any plan; but a plan that runs then stands, with
    the warning `STANDS`.
    """
    if math.isnan(time_limit_s):
        raise InputError("time_limit_s: found nan, allowed seconds")
    started = clock()

    def left_s() -> float:
        return started + time_limit_s - clock()

    problem = pose(*canonical.ordered(serving_plan, workloads), current)
    planning = _Planning(problem, coefficients.tables(problem), seed, current, method, left_s)
    ratios = _known_ratios(problem, like or current)
    try:
        plan = _rehearsed(planning, ratios) if rehearsed else planning.plan(*planning.settled(ratios, left_s))
        plan = canonical.as_asked(plan, serving_plan)
    except TimeOverError:
        if current is None:
            raise
        plan = _standing(current)
    return plan.model_copy(update={"solve_seconds": clock() - started})


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

    def judged(self, plan: Plan, left_s: Callable[[], float]) -> dict[str, GroupRehearsal]:
        """What replays say of the plan's groups, by name."""
        engine = self.problem.serving_plan.spec.engine
        return judge(
            plan,
            self.problem.workloads,
            reservation=engine.reservation,
            order=engine.order,
            seed=self.seed,
            left_s=left_s,
        )

    def rehearsed(self, plan: Plan, judged: dict[str, GroupRehearsal]) -> Plan:
        """The plan with what its replay chooses and predicts."""
        engine = self.problem.serving_plan.spec.engine
        return rehearse(
            plan,
            self.problem.workloads,
            reservation=engine.reservation,
            order=engine.order,
            seed=self.seed,
            left_s=self.left_s,
            judged=judged,
        ).plan


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
class _Candidate:
    """A plan that may be the answer, with the replicas that replays ask for."""

    settled: Settled
    unserved: list[Unserved]
    groups: dict[str, GroupRehearsal]
    holds: bool
    """Whether the replays confirm it."""

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Those that hold first, then those that serve more, then the cheaper ones."""
        return not self.holds, _lost(self.settled), self.settled.decision.objective


def _lost(settled: Settled) -> float:
    """Requests per second that are not served."""
    return round(float(settled.decision.unserved @ settled.instance.rates), 6)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A decision that was replayed."""

    decision: Decision
    short: npt.NDArray[np.bool_]
    """(J,) the candidates whose replicas did not hold."""

    def is_like(self, decision: Decision) -> bool:
        """Whether another one has the same replicas, for as much traffic."""
        same = bool((decision.replicas == self.decision.replicas).all())
        return same and np.allclose(decision.unserved, self.decision.unserved)


def _rehearsed(planning: _Planning, ratios: Array) -> Plan:
    judging_s = _sooner(planning.left_s, JUDGING_SHARE)
    seen, best, tried = np.full(len(ratios), np.nan), None, list[_Tried]()
    for _ in range(REHEARSALS):
        solved = _next(planning, ratios, judging_s, best, tried)
        if solved is None:
            break
        settled, unserved = solved
        groups = planning.judged(planning.plan(settled, unserved), judging_s)
        tried.append(_Tried(settled.decision, _short(planning.problem, settled, groups)))
        candidate = _candidate(planning.problem, settled, unserved, groups)
        if best is None or candidate.rank < best.rank:
            best = candidate
        said = _said(planning.problem, settled, groups)
        if judging_s() <= 0 or np.isnan(said).all():
            break
        seen = np.where(np.isnan(said), seen, said)
        if len(tried) == 1 and len(groups) > 1 and (pooled := _pooled(planning, seen, judging_s)) is not None:
            whole, said = pooled
            best = min(best, whole, key=lambda each: each.rank)
            seen = np.where(np.isnan(said), seen, said)
        ratios = np.where(np.isnan(seen), np.exp(np.nanmean(np.log(seen))), seen)
    if best is None:
        raise TimeOverError("no plan was found within the time limit: allow more with --time-limit")
    best = _merged(planning, ratios, judging_s, best)
    return planning.rehearsed(planning.plan(best.settled, best.unserved), best.groups)


def _pooled(planning: _Planning, seen: Array, left_s: Callable[[], float]) -> tuple[_Candidate, Array] | None:
    """One group of all classes, of the kind that carries them at least price by the closed forms and what replays have
    `seen` (J,), and what the replay says of it; None where there is no such kind, or no time.

    What several groups lose by each having to bear its own bursts, only a replay can tell.
    """
    problem, known = planning.problem, np.where(np.isnan(seen), 1.0, seen)
    guess = first_guess(problem)
    takes = capacities(problem, np.zeros(problem.allowed.shape), guess).sustained * known
    whole = problem.allowed.all(axis=0) & (takes > 0)
    if left_s() <= 0 or not whole.any():
        return None
    # The guess is for half load.
    replicas = np.ceil(guess / 2 / np.where(whole, takes, 1.0))
    price = np.where(whole, replicas * problem.sizes.price_usd_per_second, np.inf)
    only = np.arange(len(price)) == price.argmin()
    fewer = replace(planning, tables=replace(planning.tables, alone=planning.tables.alone * only))
    solved = _solved(fewer, known, left_s, first=False)
    if solved is None:
        return None
    groups = planning.judged(planning.plan(*solved), left_s)
    return _candidate(problem, *solved, groups), _said(problem, solved[0], groups)


def _merged(planning: _Planning, ratios: Array, left_s: Callable[[], float], best: _Candidate) -> _Candidate:
    """The plan with all but its cheapest group for as long as that makes a better one by replay.

    Closed forms count what each replica takes, and do not see that the bursts of a small group have nowhere to go.
    """
    while (kept := (decision := best.settled.decision).replicas > 0).sum() > 1 and left_s() > 0:
        pairs = zip(decision.replicas, planning.problem.candidates, strict=True)
        prices = [count * candidate.price_usd_per_second for count, candidate in pairs]
        kept[np.argmin(np.where(kept, prices, np.inf))] = False
        fewer = replace(planning, tables=replace(planning.tables, alone=planning.tables.alone * kept))
        solved = _solved(fewer, ratios, left_s, first=False)
        if solved is None or _lost(solved[0]) > _lost(best.settled):
            break
        candidate = _candidate(planning.problem, *solved, planning.judged(planning.plan(*solved), left_s))
        if candidate.rank >= best.rank:
            break
        best = candidate
    return best


def _next(
    planning: _Planning,
    ratios: Array,
    left_s: Callable[[], float],
    best: _Candidate | None,
    tried: list[_Tried],
) -> tuple[Settled, list[Unserved]] | None:
    """The next plan to replay: one that would be better than `best` if it held, on other replicas than were `tried`.

    None where there is none, or no time. Raises as `_solved` does.
    """
    for _ in range(DOUBTS):
        found = _solved(planning, ratios, left_s, first=best is None)
        if found is None or best is None:
            return found
        if not _may_be_better(*found, best):
            return None
        before = next((each for each in tried if each.is_like(found[0].decision)), None)
        if before is None:
            return found
        if not before.short.any():
            return None
        ratios = np.where(before.short, LESS * ratios, ratios)
    return None


def _solved(
    planning: _Planning, ratios: Array, left_s: Callable[[], float], *, first: bool
) -> tuple[Settled, list[Unserved]] | None:
    """The next plan to replay; None where there was no time for another one, or the solver failed.

    Raises TimeOverError and WorkError where the `first` is wanted.
    """
    try:
        return planning.settled(ratios, _sooner(left_s, SOLVING_SHARE))
    except TimeOverError:
        # A plan that was not replayed is worth more than none.
        return planning.settled(ratios, planning.left_s) if first else None
    except WorkError:
        if first:
            raise
        return None


def _may_be_better(settled: Settled, unserved: list[Unserved], best: _Candidate) -> bool:
    """Whether a plan is better if replays confirm it."""
    worse, lost, objective = best.rank
    return _Candidate(settled, unserved, {}, holds=True).rank < (worse, lost, objective * (1 - GAIN))


def _candidate(
    problem: Problem, settled: Settled, unserved: list[Unserved], groups: dict[str, GroupRehearsal]
) -> _Candidate:
    """The decision with the replicas that the replays ask for, as far as the pools have them."""
    decision, needed, holds = settled.decision, settled.decision.replicas.copy(), True
    for j, name in group_names(problem, decision).items():
        enough = _enough(groups.get(name), int(decision.replicas[j]))
        holds &= enough is not None
        needed[j] = enough or decision.replicas[j]
    if (needed == decision.replicas).all():
        return _Candidate(settled, unserved, groups, holds)
    if not program.fits(settled.instance, needed):
        return _Candidate(settled, unserved, groups, holds=False)
    said = _said(problem, settled, groups)
    instance = replace(settled.instance, replayed=np.where(np.isnan(said), settled.instance.replayed, said))
    other = replace(settled, instance=instance, decision=program.with_replicas(instance, decision, needed))
    return _Candidate(other, unserved, groups, holds)


def _short(problem: Problem, settled: Settled, groups: dict[str, GroupRehearsal]) -> npt.NDArray[np.bool_]:
    """(J,) the candidates that were replayed and do not hold with the replicas that they have."""
    short = np.zeros(len(problem.candidates), bool)
    for j, name in group_names(problem, settled.decision).items():
        replicas = int(settled.decision.replicas[j])
        short[j] = name in groups and (_enough(groups[name], replicas) or replicas + 1) > replicas
    return short


def _enough(found: GroupRehearsal | None, replicas: int) -> int | None:
    """Replicas of a group that hold, as far as is known; None where none are known."""
    if found is None:
        return None
    return found.replicas_needed or (replicas if found.holds else None)


def _sooner(left_s: Callable[[], float], share: float) -> Callable[[], float]:
    """A clock that ends when `share` of the time that is left has passed."""
    kept_s = left_s() * (1 - share)
    return lambda: left_s() - kept_s


def _said(problem: Problem, settled: Settled, groups: dict[str, GroupRehearsal]) -> Array:
    """(J,) what the replay lets a replica of each group take over what the closed forms do; NaN for what it has not
    replayed.

    Many replicas take more each than few, whom one burst fills. So where more than the planned ones are needed it is
    at most what makes the planned ones too few, or the next plan would be the same.
    """
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
            ratio, planned = formal[j] * found.confirmed_utilisation / busy[j], int(settled.decision.replicas[j])
            if (found.replicas_needed or 0) > planned:
                ratio = min(ratio, formal[j] / (planned * (1 + 2 * SLACK)))
            said[j] = np.clip(ratio, *RATIOS)
        elif not found.holds:
            said[j] = REFUSED * instance.replayed[j]
    return said
