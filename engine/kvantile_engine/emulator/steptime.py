"""How long an engine step takes: T = alpha + beta * sequences + gamma * context tokens + delta * prefill tokens.

Sequences and context tokens are those that decode in the step; a sequence in prefill costs delta for each of its
tokens and nothing else. That is the reading under which a request costs beta (O - 1) + gamma (O - 1)(I + O / 2) +
delta I of engine time, as the planner counts it (I prompt tokens, O output tokens).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """The four coefficients, in seconds: per step, per sequence, per context token, per prefill token."""

    alpha: float
    beta: float
    gamma: float
    delta: float

    def seconds(self, sequences: int, context_tokens: int, prefill_tokens: int) -> float:
        """Duration of a step in which `sequences` decode over `context_tokens` tokens, and so many are prefilled."""
        return self.alpha + self.beta * sequences + self.gamma * context_tokens + self.delta * prefill_tokens

    def prefill_seconds(self, prompt_tokens: int) -> float:
        """What a prompt takes alone, in one step: what is subtracted from a deadline to get the latest start."""
        return self.alpha + self.delta * prompt_tokens
