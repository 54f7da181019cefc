"""Settings of the plug-in, from KVANTILE_ENGINE_* variables: vLLM gives its scheduler no flags of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from kvantile_optimizer.waiting import Order

Unknown = Literal["refuse", "stock"]
Choice = TypeVar("Choice", bound=str)
PREFIX = "KVANTILE_ENGINE_"


@dataclass(frozen=True, slots=True)
class Settings:
    """What one engine's plug-in is to do."""

    defaults: Path | None = None
    """A file of what to reserve for requests without a hint, by class; followed while it changes."""
    order: Order = "slack"
    """Of the waiting queue; without budgets each of them is first come, first served."""
    unknown_version: Unknown = "refuse"
    """What to do under a vLLM that the plug-in was not tested with: end with a message, or run as if not there."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """The settings in `environment`. Raises ValueError with the variable's name."""
        path = environment.get(f"{PREFIX}DEFAULTS")
        return cls(
            defaults=Path(path) if path else None,
            order=_choice(environment, "ORDER", get_args(Order), "slack"),
            unknown_version=_choice(environment, "UNKNOWN_VERSION", get_args(Unknown), "refuse"),
        )


def _choice(environment: Mapping[str, str], name: str, allowed: tuple[Choice, ...], default: Choice) -> Choice:
    found = environment.get(PREFIX + name, default)
    for choice in allowed:
        if found == choice:
            return choice
    raise ValueError(f"{PREFIX}{name}: found {found!r}, allowed {', '.join(allowed)}")
