"""A plan in words: what runs where and at what price, what each class gets and why, how to get there, what if.

Every sentence is made from the plan's own figures, so that what is printed from a plan file is what was decided.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvantile_optimizer import headroom
from kvantile_optimizer.headroom import Limit
from kvantile_optimizer.plan import Group, Plan, PlanClass, PlanStatus, Route, Step

NEARLY_ALL = 0.9
"""Share of a limit above which there is nothing left for what these figures leave out."""
MOST_STEPS, MOST_NAMES = 20, 6
ACTIONS = {
    "start": "start {} ({} then)",
    "route": "route to {} ({} ready)",
    "drain": "drain {} ({} still take requests)",
    "stop": "stop {} ({} left)",
}


def render(plan: Plan, console: Console) -> None:
    """Prints `plan` for a person."""
    title = f"{plan.plan.namespace}/{plan.plan.name}: {plan.model.served_name}"
    console.print(Text(title, style="bold"))
    console.print(headline(plan), highlight=False)
    if plan.groups:
        console.print(_group_table(plan))
    if plan.routes:
        console.print(_class_table(plan))
    for line in reasons(plan):
        console.print(f"  • {line}", highlight=False, soft_wrap=True)
    if plan.steps:
        console.print("Steps from the plan that runs", style="bold")
    for line in steps(plan):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    if plan.sensitivities:
        console.print(_sensitivity_table(plan))
    for entry in plan.unserved:
        console.print(Text(f"  ! {unserved_line(entry.class_, entry.fraction, entry.remedy)}", style="bold red"))
    for warning in plan.warnings:
        console.print(Text(f"  ! {warning}", style="yellow"))


def headline(plan: Plan) -> str:
    """One line: GPUs, price, and how well the plan is proved."""
    costs = plan.costs
    parts = f"GPUs ${costs.gpu:.2f}, idle reservations ${costs.memory:.2f}, preemptions ${costs.preemption:.2f}"
    if costs.switching:
        parts += f", changes ${costs.switching:.2f}"
    return (
        f"{plan.gpu_count} GPUs, ${plan.objective_usd_per_hour:.2f}/h ({parts}); {plan.status.value}, "
        f"gap {plan.gap:.2%}, solved in {plan.solve_seconds:.1f} s"
    )


def _group_table(plan: Plan) -> Table:
    table = _table("Groups", ("group", "GPUs"), ("$/h", "KV tokens", "batch", "load", "KV P99"))
    predictions = {item.group: item for item in plan.group_predictions}
    for group in plan.groups:
        seen = predictions.get(group.name)
        table.add_row(
            group.name,
            _gpus(group),
            f"{group.price_usd_per_hour:.2f}",
            f"{group.kv_tokens:,}",
            f"{group.max_num_batched_tokens:,}",
            f"{seen.utilisation:.0%}" if seen else "",
            f"{seen.kv_p99_tokens / group.kv_tokens:.0%}" if seen else "",
        )
    return table


def _table(title: str, words: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    """A table that fits 80 columns; a name that does not is folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _gpus(group: Group) -> str:
    shape = f"tp {group.tensor_parallel}"
    if group.pipeline_parallel > 1:
        shape += f", pp {group.pipeline_parallel}"
    return f"{group.replicas} x {shape} on {group.gpu_type}"


def _class_table(plan: Plan) -> Table:
    words = ("class", "group")
    table = _table("Classes", words, ("req/s", "share", "reserve", "TTFT, s", "TPOT, ms"))
    predictions = {item.class_: item for item in plan.predictions}
    for item in plan.classes:
        seen = predictions.get(item.name)
        ttft = f"{seen.ttft_seconds:.2f} / {item.slo.ttft_seconds:g}" if seen else ""
        tpot = f"{seen.tpot_seconds * 1000:.0f} / {item.slo.tpot_seconds * 1000:.0f}" if seen else ""
        for number, route in enumerate(plan.routes_of(item.name)):
            first = number == 0
            table.add_row(
                item.name if first else "",
                route.group,
                f"{item.requests_per_second * route.fraction:.2f}",
                f"{route.fraction:.0%}",
                f"{route.reserve_tokens} ({route.fractile:.1%})" if route.form != "none" else "nothing",
                ttft if first else "",
                tpot if first else "",
            )
    return table


def reasons(plan: Plan) -> list[str]:
    """Why the plan looks as it does, a sentence each."""
    lines = [_group_reason(plan, group) for group in plan.groups]
    lines += [line for item in plan.classes for line in _reservation_reasons(plan, item)]
    lines += [
        f"the shared prefix of {item.class_} ({item.tokens} tokens) stays resident on {item.group}"
        for item in plan.resident_prefixes
    ]
    return lines


def _group_reason(plan: Plan, group: Group) -> str:
    """How many replicas, and what one fewer would miss."""
    classes = [route.class_ for route in plan.routes if route.group == group.name and route.fraction > 0]
    now = headroom.tightest(plan, group, group.replicas)
    if now is None:
        return f"{group.name}: {_replicas(group)}, though nothing is routed to it"
    carries = f"{group.name}: {_replicas(group)} {'carries' if group.replicas == 1 else 'carry'} {_listed(classes)}"
    short = [entry for entry in plan.unserved if entry.class_ in classes and entry.constraint == "gpus"]
    if short:
        return f"{carries}; more would serve more, but there are no GPUs for them"
    fewer = headroom.tightest(plan, group, group.replicas - 1)
    if fewer is None:
        return f"{carries}; {_use(now)} comes nearest to its limit"
    if fewer.share < NEARLY_ALL:
        return f"{carries}; with one fewer, {_use(fewer)} would come nearest to its limit and hold by these figures"
    verdict = "would be too much" if fewer.share > 1 else "would leave nothing for bursts"
    return f"{carries}; with one fewer, {_use(fewer)} {verdict}"


def _replicas(group: Group) -> str:
    return "1 replica" if group.replicas == 1 else f"{group.replicas} replicas"


def _use(use: headroom.Use) -> str:
    """How much of a limit is used, in words."""
    share = f"{use.share:.0%}"
    match use.limit:
        case Limit.LOAD:
            return f"its engines' time ({share} of it)"
        case Limit.TPOT:
            return f"{use.class_name}'s TPOT (about {use.used * 1000:.0f} ms, {share} of its target)"
        case Limit.TTFT:
            return f"{use.class_name}'s TTFT (about {use.used:.2f} s, {share} of its target)"
        case Limit.KV:
            return f"its KV cache (P99 at {share})"
        case Limit.SEQUENCES:
            return f"its sequences (about {use.used:.0f} at P99, {share} of what may run)"


def _reservation_reasons(plan: Plan, item: PlanClass) -> list[str]:
    return [
        f"{item.name} on {route.group}: {_reservation_reason(plan, item, route)}" for route in plan.routes_of(item.name)
    ]


def _reservation_reason(plan: Plan, item: PlanClass, route: Route) -> str:
    """Why that much: what prices ask for, and what the replays chose instead."""
    priced = route.priced_tokens
    if route.form == "none" and not priced:
        return "nothing is reserved, as the plan was asked to"
    robust = f", robust to a shift of {item.radius:.3g} tokens" if item.radius > 0 else ""
    why = f"{_prices(route)}{robust}"
    average = f"answers average {route.mean_tokens:.0f} tokens"
    if route.form == "none":
        return f"{average}; none are set aside. Prices alone ask for {priced} ({why}), but {_replayed(plan, route)}"
    held = (
        f"{average}; {route.reserve_tokens} are set aside ({_form(route)}), which covers {route.fractile:.1%} of them"
    )
    if priced is None:
        return f"{held}: {why}"
    if priced == route.reserve_tokens:
        return f"{held}: {why}, and replays found nothing better"
    return f"{held}. Prices alone ask for {priced} ({why}), but {_replayed(plan, route)}"


def _replayed(plan: Plan, route: Route) -> str:
    """What replays with the chosen reservation showed."""
    group = next(item for item in plan.groups if item.name == route.group)
    use = next((item for item in plan.group_predictions if item.group == route.group), None)
    seen = next((item for item in plan.predictions if item.class_ == route.class_), None)
    shown = [f"the KV cache is full to {use.kv_p99_tokens / group.kv_tokens:.0%} at P99"] if use else []
    shown += [f"{seen.preemption_probability:.1%} of the requests are preempted"] if seen else []
    return "replays met as many targets with this" + (f": {' and '.join(shown)}" if shown else "")


def _prices(route: Route) -> str:
    """Why that much: what a token too many and a token too few cost, where the plan says so."""
    over, under = route.idle_usd_per_token, route.shortage_usd_per_token
    if over is None or under is None or over + under == 0:
        return "beyond that an idle token costs more than a preemption saves"
    times = f"{under / over:.3g} times what an idle one does" if over > 0 else "something and an idle one nothing"
    fixed = f", and any shortage that of {route.shortage_usd / under:.0f} more" if under and route.shortage_usd else ""
    return f"a missing token costs {times}{fixed}, so the fractile to cover is {under / (over + under):.1%}"


def _form(route: Route) -> str:
    return f"pooled, of which {route.pooling_fraction:.0%} count" if route.form == "pooled" else route.form


def steps(plan: Plan) -> list[str]:
    """How to get to the plan from the one that runs, a line for each step; long changes are cut."""
    lines = [_step(number, step) for number, step in enumerate(plan.steps, start=1)]
    hidden = len(lines) - MOST_STEPS
    return lines if hidden <= 0 else [*lines[:MOST_STEPS], f"… and {hidden} more, all of them in -o json"]


def _step(number: int, step: Step) -> str:
    group = f"the old {step.group}" if step.plan == "running" else step.group
    gpus = ", ".join(f"{count} {pool}" for pool, count in step.gpus_in_use.items() if count)
    alone = f"; {_listed(step.uncovered)} without a group" if step.uncovered else ""
    done = ACTIONS[step.action].format(group, step.replicas)
    return f"{number}. {done}: {step.reason} (GPUs: {gpus or 'none'}){alone}"


def _sensitivity_table(plan: Plan) -> Table:
    table = _table("What would change it", ("change",), ("$/h", "unserved", "GPUs"))
    for entry in plan.sensitivities:
        if entry.delta_usd_per_hour is None:
            table.add_row(entry.change, "no time", "", "")
            continue
        unserved = 100 * (entry.unserved_fraction_delta or 0.0)
        cut = " (time limit)" if entry.status == PlanStatus.FEASIBLE else ""
        table.add_row(
            entry.change + cut,
            _signed(entry.delta_usd_per_hour, 2),
            f"{_signed(unserved, 1)} %",
            f"{_signed((entry.gpus or 0) - plan.gpu_count, 0)}",
        )
    return table


def _signed(value: float, digits: int) -> str:
    """With a sign, unless it rounds to nothing."""
    return f"{value:+.{digits}f}" if round(value, digits) else "0"


def _listed(names: list[str]) -> str:
    """The first few names."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def unserved_line(name: str, fraction: float, remedy: str) -> str:
    """What is not served and what would lift it."""
    return f"{fraction:.0%} of {name} cannot be served; what would lift it: {remedy}"
