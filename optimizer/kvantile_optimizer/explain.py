"""A plan in words: what runs where and at what price, what each class gets, and why.

Every sentence is made from the plan's own figures, so that what is printed from a plan file is what was decided.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvantile_optimizer.plan import Group, Plan, PlanClass, Route


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
    classes = [route.class_ for route in plan.routes if route.group == group.name and route.fraction > 0]
    seen = next((item for item in plan.group_predictions if item.group == group.name), None)
    if not classes or seen is None:
        return f"{group.name}: kept, though nothing is routed to it"
    tightest = min((item for item in plan.classes if item.name in classes), key=lambda item: item.slo.tpot_seconds)
    full = seen.kv_p99_tokens / group.kv_tokens
    who = "1 replica carries" if group.replicas == 1 else f"{group.replicas} replicas carry"
    bound = "its KV cache" if full > seen.utilisation else "its time per step"
    return (
        f"{group.name}: {who} {', '.join(classes)}; {bound} comes nearest to its limit "
        f"(utilisation {seen.utilisation:.0%}, KV P99 {full:.0%}), and {tightest.name}'s TPOT of "
        f"{tightest.slo.tpot_seconds * 1000:.0f} ms sets the step's length"
    )


def _reservation_reasons(plan: Plan, item: PlanClass) -> list[str]:
    lines = []
    for route in plan.routes_of(item.name):
        if route.form == "none":
            lines.append(f"{item.name} on {route.group}: nothing is reserved, as the plan was asked to")
            continue
        robust = f", robust to a shift of {item.radius:.3g} tokens" if item.radius > 0 else ""
        lines.append(
            f"{item.name} on {route.group}: answers average {route.mean_tokens:.0f} tokens; {route.reserve_tokens} "
            f"are set aside ({_form(route)}), which covers {route.fractile:.1%} of them: beyond that an idle token "
            f"costs more than a preemption saves{robust}"
        )
    return lines


def _form(route: Route) -> str:
    return f"pooled, of which {route.pooling_fraction:.0%} count" if route.form == "pooled" else route.form


def unserved_line(name: str, fraction: float, remedy: str) -> str:
    """What is not served and what would lift it."""
    return f"{fraction:.0%} of {name} cannot be served; what would lift it: {remedy}"
