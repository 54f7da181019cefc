"""What a plan predicts against a fresh replay of the traffic that it was made for.

The replayed requests are the planned half's own, from another place on for each seed, so that bursts meet other states
of the fleet. Of each figure the largest relative error over the scenarios counts, for plans whose replicas are used to
at most 0.85; targets four times as loose give plans that are used more. Utilisation is rho, engine-seconds per second
of arrivals and replica, and where the plan says it also the share of time in steps.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from benchmarks.optimizer.row import Row, Run, Setting, Target
from benchmarks.optimizer.scenarios import SOURCES, Scenario, halves, rotated
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator import rows
from kvantile_optimizer.simulator.fleet import PlanOutcome

MOST_UTILISED = 0.85
COUNT = 20_000
"""Requests of a replay: several passes through the planned half, or a split of long prompts has a spread of its own."""
LEAST_SHARE = 0.1
"""Of the requests; a group that gets fewer is passed over."""
BOUNDS = {"TTFT P99": 0.10, "TPOT P99": 0.10, "TPOT mean": 0.03, "KV P99": 0.10, "utilisation": 0.03}


def scenarios(quick: bool) -> list[Scenario]:
    """Every trace at two rates, with its targets and with loose ones."""
    every = [
        Scenario(name, "one", rate, slack)
        for name, source in SOURCES.items()
        for rate in source.rates[:2]
        for slack in (1, 4)
    ]
    return every[:1] if quick else every


def run(setting: Setting, seed: int) -> Run:
    """The largest relative error of each predicted figure."""
    every = scenarios(setting.quick)
    begin = seed * len(every) // 5
    errors: dict[str, list[float]] = defaultdict(list)
    notes = {}
    for scenario in setting.watch.within([*every[begin:], *every[:begin]]):
        plan = scenario.plan(setting)
        if plan.unserved or max(item.utilisation for item in plan.group_predictions) > MOST_UTILISED:
            notes[scenario.name] = f"passed over, unserved or used above {MOST_UTILISED}"
            continue
        found = scenario.replayed(plan, rotated(halves(setting, scenario.source)[0], seed, COUNT), seed)
        mine = _errors(plan, found)
        for name, error in mine.items():
            errors[name].append(abs(error))
        if missed := [f"{name} {error:+.1%}" for name, error in mine.items() if abs(error) > BOUNDS[name]]:
            rho = max(item.utilisation for item in plan.group_predictions)
            notes[scenario.name] = f"at rho {rho:.2f} the replay has {', '.join(missed)}"
    figures = {name: max(errors[name], default=math.nan) for name in BOUNDS}
    if any(math.isnan(error) for error in errors["TPOT mean"]):
        notes["all"] = "some plans do not say the mean TPOT"
        figures["TPOT mean"] = math.nan
    return Run(figures, notes)


def _errors(plan: Plan, found: PlanOutcome) -> dict[str, float]:
    """How far the replay is above the prediction, of the worst group where there are several."""
    (row,), (said,) = rows.class_rows(found), plan.predictions
    errors = {
        "TTFT P99": _relative(row["ttftSeconds"], said.ttft_seconds),
        "TPOT P99": _relative(row["tpotSeconds"], said.tpot_seconds),
        "TPOT mean": _relative(row["tpotMeanSeconds"], said.tpot_mean_seconds),
    }
    kv, used = [], []
    for place, group_row in enumerate(rows.group_rows(found)):
        forecast = next(item for item in plan.group_predictions if item.group == group_row["group"])
        if int(group_row["requests"] or 0) >= LEAST_SHARE * len(found.requests):
            kv.append(_relative(group_row["kvP99Tokens"], forecast.kv_p99_tokens))
            used.append(_relative(_utilisation(found, place), forecast.utilisation))
            if forecast.busy_fraction is not None:
                used.append(_relative(group_row["busyFraction"], forecast.busy_fraction))
    return {**errors, "KV P99": max(kv, key=abs), "utilisation": max(used, key=abs)}


def _relative(seen: float | int | str | None, said: float | None) -> float:
    if said is None or seen is None:
        return math.nan
    return float(seen) / max(said, 1e-9) - 1


def _utilisation(found: PlanOutcome, place: int) -> float:
    """rho of a group: the computing that its requests brought, each token once, per replica and second of arrivals.

    The seconds after the last arrival do not count: in a replay of half an hour the longest answers take 1 to 2 %.
    """
    group, mine = found.plan.groups[place], found.group_index == place
    prompt, steps = found.requests.prompt[mine], found.requests.output[mine] - 1
    step = group.step_time
    brought = step.delta * prompt + step.beta * steps + step.gamma * steps * (prompt + (steps + 1) / 2)
    return float(np.sum(brought)) / (found.outcome.arriving_s * group.replicas)


ROWS = (
    Row(
        "predictions",
        f"predictions against a fresh replay, four traces, rho up to {MOST_UTILISED}",
        tuple(
            Target(name, bound, "at most", "{:.1%}", what=f"largest error of {name}") for name, bound in BOUNDS.items()
        ),
        run,
        limit_s=400,
        needs_traces=True,
    ),
)
