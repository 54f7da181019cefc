"""Plans on the half of a trace that they did not see: whether the targets they were made for are met there.

Each (trace, set of pools, rate) is planned on the first half and the second half is replayed at the planned rate. A
scenario counts when the plan serves everything. It is met when P99 of TTFT and TPOT are within the targets, and at
most one request in a hundred was refused. A miss says whether the plan holds on the half that it did see: if not, the
prediction is to blame; if so, the later half is other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.optimizer.row import Row, Run, Setting, Target
from benchmarks.optimizer.scenarios import POOL_SETS, SOURCES, Scenario, halves
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator import rows
from kvantile_optimizer.simulator.fleet import PlanOutcome

MOST_REFUSED = 0.01


@dataclass(frozen=True, slots=True)
class Seen:
    """A replay's P99s beside the targets, seconds."""

    ttft_s: float
    tpot_s: float
    refused: float
    """Share of the requests."""
    ttft_target_s: float
    tpot_target_s: float

    @classmethod
    def of(cls, found: PlanOutcome) -> Seen:
        """Of the only class of a plan."""
        (row,) = rows.class_rows(found)
        slo = found.plan.classes[0].slo
        ttft_s, tpot_s = (float(row[name] or 0.0) for name in ("ttftSeconds", "tpotSeconds"))
        refused = float((~found.outcome.served).mean())
        return cls(ttft_s, tpot_s, refused, slo.ttft_seconds, slo.tpot_seconds)

    @property
    def missed(self) -> list[str]:
        """The targets that were missed, each with what was measured."""
        figures = (("TTFT", self.ttft_s, self.ttft_target_s), ("TPOT", self.tpot_s, self.tpot_target_s))
        late = [f"{name} {value:.3g} s of {target:g} s" for name, value, target in figures if value > target]
        return late + ([f"{self.refused:.1%} refused"] if self.refused > MOST_REFUSED else [])


def scenarios(quick: bool) -> list[Scenario]:
    """All of them, or two for a quick look."""
    every = [
        Scenario(name, pools, rate) for name, source in SOURCES.items() for pools in POOL_SETS for rate in source.rates
    ]
    return [every[0], every[-3]] if quick else every


def run(setting: Setting, seed: int) -> Run:
    """The share of the scenarios that the planner called feasible whose targets held."""
    every = scenarios(setting.quick)
    # Each run begins elsewhere, so that two at a time do not make the same plan at once.
    begin = seed * len(every) // 5
    met: list[bool] = []
    notes = {}
    for scenario in setting.watch.within([*every[begin:], *every[:begin]]):
        plan = scenario.plan(setting)
        if plan.unserved:
            entry = plan.unserved[0]
            notes[scenario.name] = f"not called feasible ({entry.fraction:.0%} unserved, {entry.constraint})"
            continue
        seen, unseen = halves(setting, scenario.source)
        after = Seen.of(scenario.replayed(plan, unseen, seed))
        met.append(not after.missed)
        if after.missed:
            before = Seen.of(scenario.replayed(plan, seen, seed))
            notes[scenario.name] = _miss(plan, before, after)
    notes["all"] = f"{len(met)} scenarios called feasible, {sum(met)} met"
    return Run({"met": sum(met) / len(met) if met else 0.0}, notes)


def _miss(plan: Plan, before: Seen, after: Seen) -> str:
    said = plan.predictions[0]
    cause = f"so on the half that was planned with ({', '.join(before.missed)})" if before.missed else "other traffic"
    groups = ", ".join(f"{group.replicas} {group.name}" for group in plan.groups)
    predicted = f"predicted {said.ttft_seconds:.3g} s and {said.tpot_seconds:.3g} s"
    return f"{', '.join(after.missed)}; {predicted}; {groups}; {cause}"


ROWS = (
    Row(
        "heldout",
        "P99 of TTFT and TPOT on the half of the trace that the plan did not see: feasible scenarios that keep them",
        (Target("met", 0.95, "at least", "{:.1%}"),),
        run,
        limit_s=900,
        needs_traces=True,
    ),
)
