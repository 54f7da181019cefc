"""The emulator's settings: one frozen model, made once from flags, `KVANTILE_*` variables and a TOML file.

`cli` makes the flags from the fields, so a setting is added here and nowhere else. Times are engine seconds: with
`speed` X an engine second lasts 1/X seconds of real time.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvantile_engine.emulator.failures import Failures
from kvantile_engine.emulator.scheduler import Limits
from kvantile_engine.emulator.steptime import StepTime
from kvantile_optimizer.waiting import Order

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


VllmVersion = Literal["0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


class Settings(BaseModel):
    """What one emulated replica is. The step-time defaults are those of an 8B model on one A100, roughly."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Annotated[str, Field(min_length=1)] = "emulated"
    """Name of the model."""
    served_model_name: str | None = None
    """Name that clients use; the model's unless set."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    gpu: str | None = None
    """GPU of the planner's table: KV cache and step times are what is expected of it, unless they are given."""
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs of the replica, with --gpu."""
    kv_tokens: Count = 65_536
    """KV cache, in tokens; rounded down to whole blocks."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    max_num_seqs: Count = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: Count = 2048
    """Most tokens computed in one step."""
    max_model_len: Count = 16_384
    """Longest prompt and answer together, in tokens."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.012
    """Seconds of every step."""
    beta: Seconds = 0.0001
    """Seconds per decoding sequence in a step."""
    gamma: Seconds = 8e-8
    """Seconds per context token in a step."""
    delta: Seconds = 1e-4
    """Seconds per prefill token in a step."""
    vllm_version: VllmVersion = "0.33.0"
    """The version that /version tells and whose metrics /metrics has."""
    speed: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] = 1.0
    """Times faster than real time."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the blocks that admission leaves free while something runs."""
    order: Order = "slack"
    """Who is admitted first; without TTFT budgets all three are first come, first served."""
    stream_interval: Count = 1
    """Tokens in a streamed chunk; the first token is sent at once."""
    enable_prefix_caching: bool = True
    """Whether prompts share blocks of equal prefixes."""
    seed: int = 0
    """Seed of the lengths of answers that no request gives."""
    enable_request_id_headers: bool = False
    """Whether answers carry X-Request-Id."""
    grace_period: Seconds = 30.0
    """Real seconds that running requests get after SIGTERM."""
    fail: str = ""
    """What goes wrong, for tests: slow-start=SECONDS, hang=SHARE, cut=SHARE, 5xx=SHARE, oom=TOKENS, with commas."""

    @field_validator("fail")
    @classmethod
    def _can_fail(cls, text: str) -> str:
        Failures.parse(text)
        return text

    @model_validator(mode="after")
    def _has_a_block(self) -> Self:
        if self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens of at least one block, {self.block_size}")
        return self

    @property
    def public_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model

    @property
    def total_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_tokens // self.block_size

    @property
    def longest(self) -> int:
        """Most tokens of one sequence: the model's length or the whole KV cache."""
        return min(self.max_model_len, self.total_blocks * self.block_size)

    @property
    def failures(self) -> Failures:
        """What `fail` says."""
        return Failures.parse(self.fail)

    def limits(self) -> Limits:
        """The scheduler's part."""
        return Limits(
            total_blocks=self.total_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            watermark=self.watermark,
            order=self.order,
            prefix_caching=self.enable_prefix_caching,
        )

    def step_time(self) -> StepTime:
        """The step-time part."""
        return StepTime(self.alpha, self.beta, self.gamma, self.delta)
