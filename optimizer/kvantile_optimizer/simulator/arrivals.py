"""From a trace to the requests of a replay: when they arrive, and which class of the plan they are.

A row whose label is a class's name, as `kvantile fit` makes names of labels, belongs to it. Another one belongs to the
first class with a rule about prompt lengths alone that holds (a trace knows nothing else that rules look at), and to
the default class otherwise. Rows without arrival times come as a Poisson process at the plan's rate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.classes import class_name
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan, PlanClass
from kvantile_optimizer.simulator.replica import Requests
from kvantile_optimizer.simulator.state import Ints
from kvantile_optimizer.traces import Trace


def of_trace(
    plan: Plan, trace: Trace, *, speed: float = 1.0, prefix_cache: bool = True, seed: int = 0
) -> tuple[Requests, Ints]:
    """The requests (N,) in order of arrival, and their classes (N,) as places in the plan.

    `speed` divides the gaps between arrivals. With `prefix_cache` what a replica has cached costs no computing; where
    the trace does not say what prompts consist of, that is the whole prefix which it says was seen before.
    Raises InputError for a trace without times where the plan has no rate either.
    """
    timed = np.isfinite(trace.arrival_s)
    arrival_s = trace.arrival_s - trace.arrival_s[0] if timed.all() else _poisson(plan, len(trace), seed)
    requests = Requests(
        arrival_s=arrival_s / speed,
        prompt=trace.prompt,
        output=trace.output,
        cached=trace.prefix_tokens if prefix_cache else 0,
        hash_ids=trace.hash_ids if prefix_cache else None,
    )
    return requests, classes_of(plan, trace.labels, trace.prompt)


def _poisson(plan: Plan, count: int, seed: int) -> npt.NDArray[np.float64]:
    rate = sum(item.requests_per_second for item in plan.classes)
    if rate <= 0:
        raise InputError("arrival_s: found rows without a time, allowed them only where the plan has rates")
    return np.asarray(np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)))


def classes_of(plan: Plan, labels: npt.NDArray[np.str_], prompt: Ints) -> Ints:
    """Places of classes (N,) for rows with `labels` (N,) and `prompt` (N,) tokens."""
    found = np.full(len(prompt), next(place for place, item in enumerate(plan.classes) if item.default))
    for place in range(len(plan.classes) - 1, -1, -1):
        found[_by_length(plan.classes[place], prompt)] = place
    places = {item.name: place for place, item in enumerate(plan.classes)}
    names, inverse = np.unique(labels, return_inverse=True)
    named = np.array([places.get(class_name(str(name)), -1) if name else -1 for name in names])[inverse]
    return np.where(named >= 0, named, found)


def _by_length(item: PlanClass, prompt: Ints) -> npt.NDArray[np.bool_]:
    """(N,) whether a rule of the class that is about prompt tokens only holds."""
    holds = np.zeros(len(prompt), np.bool_)
    for match in item.match:
        bounds = match.prompt_tokens
        if bounds is not None and match.model_fields_set == {"prompt_tokens"}:
            least, most = bounds.gte or 0, np.inf if bounds.lte is None else bounds.lte
            holds |= (prompt >= least) & (prompt <= most)
    return holds
