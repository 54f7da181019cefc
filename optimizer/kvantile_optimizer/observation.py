"""What the gateway saw of each class: the only thing that flows back from serving to planning.

The gateway keeps counts of output lengths (with those cut off by `max_tokens` apart, since they are censored), prompt
lengths and arrivals, and serves them as JSON at `/observations`; whoever plans reads them. Counts add up, so several
gateways' observations merge by addition. Lengths are kept on a grid that is exact up to 64 tokens and 1.6 % wide
above, which bounds a class at some 700 counters whatever it sends.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

OBSERVATION_VERSION: Literal[1] = 1
EXACT_UP_TO = 64


def length_bucket(tokens: int) -> int:
    """The grid length that stands for `tokens`: itself up to 64, above that the bucket's midpoint."""
    if tokens <= EXACT_UP_TO:
        return max(0, tokens)
    shift = tokens.bit_length() - EXACT_UP_TO.bit_length()
    return tokens if shift <= 0 else (tokens >> shift << shift) + (1 << (shift - 1))


class ClassObservation(BaseModel):
    """Counts of one class, since its start or the window's."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    requests: Annotated[int, Field(ge=0)] = 0
    """Requests that arrived, answered or not."""
    arrival_seconds_sum: Annotated[float, Field(ge=0)] = 0.0
    """Sum of the times between consecutive arrivals."""
    arrival_seconds_squared_sum: Annotated[float, Field(ge=0)] = 0.0
    finished: dict[int, int] = {}
    """Output length in tokens (on the grid) to the number of answers that ended by themselves."""
    censored: dict[int, int] = {}
    """The same for answers that `max_tokens` or a disconnect cut off."""
    prompts: dict[int, int] = {}
    """Prompt length in tokens (on the grid) to the number of answered requests."""

    @property
    def answers(self) -> int:
        """Answers whose length is known, censored or not."""
        return sum(self.finished.values()) + sum(self.censored.values())


class Observations(BaseModel):
    """What one gateway saw; `to_json` and pydantic's `model_validate_json` are the contract."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    version: Literal[1] = OBSERVATION_VERSION
    since_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long counts have been taken."""
    classes: dict[str, ClassObservation] = {}

    def to_json(self) -> dict[str, Any]:
        """The observations as JSON data."""
        return self.model_dump(mode="json", by_alias=True)

    def minus(self, earlier: Self) -> Observations:
        """What was seen after `earlier`, an older reading of the same gateway."""
        return Observations(
            since_seconds=max(0.0, self.since_seconds - earlier.since_seconds),
            classes={
                name: _difference(now, earlier.classes.get(name, ClassObservation()))
                for name, now in self.classes.items()
            },
        )


def _difference(now: ClassObservation, then: ClassObservation) -> ClassObservation:
    def less(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
        return {length: rest for length, count in left.items() if (rest := count - right.get(length, 0)) > 0}

    return ClassObservation(
        requests=max(0, now.requests - then.requests),
        arrival_seconds_sum=max(0.0, now.arrival_seconds_sum - then.arrival_seconds_sum),
        arrival_seconds_squared_sum=max(0.0, now.arrival_seconds_squared_sum - then.arrival_seconds_squared_sum),
        finished=less(now.finished, then.finished),
        censored=less(now.censored, then.censored),
        prompts=less(now.prompts, then.prompts),
    )
