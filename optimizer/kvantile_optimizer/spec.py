"""The ServingPlan: what a user asks for. These models are the API; the CRD is generated from them.

Every mapping forbids unknown keys. Decimal figures are strings (`"4.50"`), because the API has no floats; integers
carry their unit in the name. What one field cannot say alone (no default class, two classes of one name) is checked by
the model that holds both. Reading a file and wording the errors is `specfile`'s.
"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

KIND = "ServingPlan"
MAX_CLASSES = 10_000
MAX_POOLS = 50
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration_seconds(text: str) -> int:
    """Seconds of a duration such as `10m` or `1h30m`. Raises ValueError for anything else."""
    found = _DURATION.fullmatch(text)
    if not found or not any(found.groups()):
        raise ValueError("a duration such as 30s, 10m or 1h30m")
    return sum(int(part) * unit for part, unit in zip(found.groups("0"), (86400, 3600, 60, 1), strict=True))


def _positive_duration(text: str) -> str:
    if duration_seconds(text) <= 0:
        raise ValueError("a duration above zero")
    return text


def _positive(text: str) -> str:
    if Decimal(text) <= 0:
        raise ValueError('a decimal above zero, in quotes, such as "0.5"')
    return text


def _at_most_one(text: str) -> str:
    if Decimal(text) > 1:
        raise ValueError('a decimal from "0" to "1", in quotes')
    return text


def _must_be_text(value: object) -> object:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f'a decimal in quotes, such as "{value}"')  # noqa: TRY004 - pydantic collects ValueErrors
    return value


Quantity = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$", max_length=19),
    BeforeValidator(_must_be_text),
]
"""A decimal of at least zero, as a string."""
PositiveQuantity = Annotated[Quantity, AfterValidator(_positive)]
Share = Annotated[Quantity, AfterValidator(_at_most_one)]
Radius = Annotated[
    str, StringConstraints(pattern=r"^(auto|[0-9]{1,9}(\.[0-9]{1,9})?)$"), BeforeValidator(_must_be_text)
]
"""Tokens as a decimal of at least zero, or `auto`."""
Duration = Annotated[str, StringConstraints(max_length=16), AfterValidator(_positive_duration)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", min_length=1, max_length=512)]
"""Printed as it stands, so a terminal must not obey it."""
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]


class SpecModel(BaseModel):
    """Base of every part of the spec: camelCase outside, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )


class Geometry(SpecModel):
    """The shape of a model that the catalogue lacks: what its `config.json` says."""

    layers: Annotated[int, Field(ge=1, le=1000)]
    hidden_size: Annotated[int, Field(ge=1, le=1_000_000)]
    attention_heads: Annotated[int, Field(ge=1, le=10_000)]
    kv_heads: Annotated[int, Field(ge=1, le=10_000)]
    head_dim: Annotated[int, Field(ge=1, le=10_000)]
    parameters_millions: Annotated[int, Field(ge=1, le=100_000_000)]
    """All parameters, in millions."""
    active_parameters_millions: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Parameters used for one token, in millions; all of them unless the model is a mixture of experts."""
    embedding_parameters_millions: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Those of them that look tokens up and that give the logits: neither is computed for each token of a prompt."""
    weights_megabytes: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Size of the checkpoint in MB (10^6 bytes) where not all weights have the type below, as after quantisation."""
    sliding_window: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Tokens that layers without full attention look back, and keep, for each sequence."""
    full_attention_layers: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Layers that keep the whole context; all of them unless there is a sliding window."""
    kv_latent_dim: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Values cached per token and layer under multi-head latent attention, which replaces kvHeads * headDim * 2."""
    dtype: Literal["bfloat16", "float16", "float32", "fp8", "int8", "int4"] = "bfloat16"
    """Type of the weights."""
    kv_dtype: Literal["bfloat16", "float16", "float32", "fp8"] = "bfloat16"
    """Type of the KV cache."""

    @property
    def sliding_layers(self) -> int:
        """Layers that keep no more than the window."""
        if self.sliding_window is None:
            return 0
        return self.layers - (self.full_attention_layers or 0)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.full_attention_layers or 0) > self.layers:
            raise ValueError(f"fullAttentionLayers at most layers, {self.layers}")
        if self.embedding_parameters_millions >= (self.active_parameters_millions or self.parameters_millions):
            raise ValueError("embeddingParametersMillions below the parameters used for one token")
        return self


class Model(SpecModel):
    """What is served."""

    name: Text
    """What vLLM loads, such as `meta-llama/Llama-3.1-8B-Instruct`."""
    served_name: Text | None = None
    """What clients call it; the name unless set."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)]
    """Longest prompt and answer together, in tokens."""
    geometry: Geometry | None = None
    """Only for models that the catalogue lacks."""

    @property
    def public_name(self) -> str:
        """The name clients use."""
        return self.served_name or self.name


class Engine(SpecModel):
    """How the replicas run."""

    image: Text = "vllm/vllm-openai:v0.33.0"
    """Container image of the engine."""
    reservation: Literal["Auto", "None", "Held", "Pooled", "Advisory"] = "Auto"
    """How output is reserved: chosen by the planner, not at all, held until used, pooled, or only told the engine."""
    order: Literal["Slack", "Deadline", "FirstCome"] = "Slack"
    """Who is admitted first."""
    args: Annotated[list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=100)] = []
    """Further arguments of the engine."""
    env: Annotated[list[dict[str, Any]], Field(max_length=100)] = []
    """Further environment of the engine, as in a container."""
    pod_template: dict[str, Any] = {}
    """Merged over the generated pod template: volumes, tolerations, resources."""


class Gpu(SpecModel):
    """The GPUs of a pool."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    """A name of the GPU table, such as H100-80."""
    resource: Text = "nvidia.com/gpu"
    """The extended resource that nodes offer."""
    per_node: Annotated[int, Field(ge=1, le=64)] = 8
    """GPUs in a node."""


class Calibration(SpecModel):
    """What an engine on GPUs of the pool was measured to do, as `kvantile calibrate` prints it.

    It replaces what the planner assumes for this parallelism. A step takes alpha + beta * sequences + gamma * context
    tokens + delta * prefill tokens.
    """

    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    alpha_nanoseconds: PositiveQuantity
    beta_nanoseconds: Quantity
    gamma_nanoseconds: Quantity
    delta_nanoseconds: PositiveQuantity
    kv_tokens: Tokens | None = None
    """KV cache of the measured engine; computed from the GPU's memory unless set."""
    max_num_seqs: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Of the measured engine, with the next one: with others the cache is larger or smaller."""
    max_num_batched_tokens: Tokens = 2048


class NodePool(SpecModel):
    """Nodes of one kind."""

    name: Name
    node_selector: Annotated[dict[str, str], Field(max_length=50)] = {}
    """Labels that the pool's nodes carry."""
    gpu: Gpu
    max_gpus: int | None = Field(default=None, alias="maxGPUs", ge=0, le=100_000)
    """GPUs that may be used; what the nodes have unless set, and unlimited when planning offline."""
    price_per_gpu_hour: PositiveQuantity | None = Field(default=None, alias="pricePerGPUHour")
    """US dollars; the GPU table's price unless set."""
    calibrations: Annotated[list[Calibration], Field(max_length=50)] = []
    """Measured engines, one for each parallelism that was measured."""

    @model_validator(mode="after")
    def _measures_each_parallelism_once(self) -> Self:
        pairs = [(item.tensor_parallel, item.pipeline_parallel) for item in self.calibrations]
        if len(set(pairs)) < len(pairs):
            raise ValueError("calibrations of different tensorParallel and pipelineParallel")
        return self


class IntegerRange(SpecModel):
    """Bounds, both included."""

    lte: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    gte: Annotated[int, Field(ge=0, le=10_000_000)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.lte is None and self.gte is None:
            raise ValueError("at least one of lte and gte")
        if self.lte is not None and self.gte is not None and self.gte > self.lte:
            raise ValueError("gte at most lte")
        return self


class Match(SpecModel):
    """One way to belong to a class: all keys given here must hold."""

    paths: Annotated[list[Text], Field(min_length=1, max_length=50)] | None = None
    models: Annotated[list[Text], Field(min_length=1, max_length=50)] | None = None
    headers: Annotated[dict[str, str], Field(min_length=1, max_length=50)] | None = None
    prompt_tokens: IntegerRange | None = None
    max_tokens: IntegerRange | None = None
    tools: bool | None = None
    system_prefix: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    """What the system prompt begins with."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("at least one of paths, models, headers, promptTokens, maxTokens, tools and systemPrefix")
        return self


class Slo(SpecModel):
    """What a request of the class is promised."""

    ttft_milliseconds: Milliseconds
    """Time to the first token."""
    tpot_milliseconds: Milliseconds
    """Time per further token."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 99
    """The share of requests, in percent, that must meet each target."""
    deadline_milliseconds: Milliseconds | None = None
    """When the gateway gives a request up; never unless set."""


class SharedPrefix(SpecModel):
    """A prompt prefix that the requests of a class have in common."""

    tokens: Tokens
    share: Share = "1"
    """Share of the requests that carry it."""


class PromptLengths(SpecModel):
    """A distribution of token counts: mean and p99 (a log-normal), or percentiles and max (joined linearly)."""

    mean: Tokens | None = None
    p1: Tokens | None = None
    p5: Tokens | None = None
    p10: Tokens | None = None
    p25: Tokens | None = None
    p50: Tokens | None = None
    p75: Tokens | None = None
    p90: Tokens | None = None
    p95: Tokens | None = None
    p99: Tokens | None = None
    max: Tokens | None = None

    def percentiles(self) -> dict[int, int]:
        """The percentiles that are given, in rising order."""
        given = {percent: getattr(self, f"p{percent}") for percent in PERCENTILES}
        return {percent: value for percent, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _is_one_of_the_two(self) -> Self:
        known = self.percentiles()
        if self.mean is not None:
            if set(known) != {99}:
                raise ValueError("mean together with p99 and no other percentile")
            if self.p99 is not None and self.p99 < self.mean:
                raise ValueError(f"p99 at least the mean, {self.mean}")
        elif not known or self.max is None:
            raise ValueError("either mean and p99, or percentiles and max")
        steps = [*known.items(), *([(100, self.max)] if self.max is not None else [])]
        for (lower, below), (upper, above) in pairwise(steps):
            if above < below:
                upper_name = "max" if upper == 100 else f"p{upper}"
                raise ValueError(f"{upper_name} at least p{lower}, {below}")
        return self


class OutputLengths(PromptLengths):
    """The same for answers; `max` is the support's end, the model's length less the prompt unless set."""


class ConfigMapKey(SpecModel):
    """A key of a ConfigMap in the plan's namespace."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    key: Annotated[str, StringConstraints(min_length=1, max_length=253)]


class Samples(SpecModel):
    """Recorded lengths, as a trace in any format that `kvantile fit` reads."""

    config_map_ref: ConfigMapKey


class Demand(SpecModel):
    """How much of a class arrives, and how long it is."""

    requests_per_second: PositiveQuantity
    burstiness: Quantity = "1"
    """Coefficient of variation of the times between arrivals; 1 is Poisson."""
    samples: Samples | None = None
    prompt_tokens: PromptLengths | None = None
    output_tokens: OutputLengths | None = None

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        if (self.samples is None) == (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("either samples, or both promptTokens and outputTokens")
        if self.samples is not None and (self.prompt_tokens is not None or self.output_tokens is not None):
            raise ValueError("either samples, or both promptTokens and outputTokens")
        return self


class ClassRobustness(SpecModel):
    """What differs for one class from the plan's `robustness`."""

    radius: Radius
    """In tokens, or `auto`."""


class RequestClass(SpecModel):
    """Requests that are planned and treated alike."""

    name: Name
    default: bool = False
    """Takes every request that no other class matches; exactly one class does."""
    match: Annotated[list[Match], Field(max_length=50)] = []
    """Any item that matches puts a request into the class."""
    slo: Slo
    shared_prefix: SharedPrefix | None = None
    demand: Demand
    robustness: ClassRobustness | None = None
    """What `kvantile fit` found for this class; the plan's unless set."""


class Robustness(SpecModel):
    """The Wasserstein ball around the observed output lengths."""

    order: Literal[1, 2] = 2
    radius: Radius = "auto"
    """In tokens, or `auto`."""


class Costs(SpecModel):
    """Weights on the calibrated costs; 1 is the calibration."""

    memory: Quantity = "1.0"
    preemption: Quantity = "1.0"


class Replan(SpecModel):
    """When the plan is made anew."""

    interval: Duration = "10m"
    window: Duration = "1h"
    """How far back observations count."""
    hysteresis_percent: Annotated[int, Field(ge=0, le=100)] = 5
    """The running plan stays while a new one would be less than this much cheaper."""
    observed_traffic: bool = True
    """Whether what the gateway sees replaces the demand given here."""


class Router(SpecModel):
    """The gateway."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 2
    allow_class_header: bool = False
    """Whether clients may choose their class by `x-kvantile-class`."""
    allow_hints: bool = False
    """Whether clients may send `kv_*` hints of their own."""


class ServingPlanSpec(SpecModel):
    """What to serve, on what, for whom."""

    model: Model
    engine: Engine = Engine()
    node_pools: Annotated[list[NodePool], Field(min_length=1, max_length=MAX_POOLS)]
    classes: Annotated[list[RequestClass], Field(min_length=1, max_length=MAX_CLASSES)]
    robustness: Robustness = Robustness()
    costs: Costs = Costs()
    replan: Replan = Replan()
    router: Router = Router()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _refuse_twins("nodePools", [pool.name for pool in self.node_pools])
        _refuse_twins("classes", [item.name for item in self.classes])
        defaults = [item.name for item in self.classes if item.default]
        if len(defaults) != 1:
            found = " and ".join(defaults) if defaults else "none"
            raise ValueError(f"exactly one class with default: true (found {found})")
        return self


def _refuse_twins(field: str, names: list[str]) -> None:
    twins = sorted(name for name, count in Counter(names).items() if count > 1)
    if twins:
        raise ValueError(f"{field} of different names (found {twins[0]} twice)")


class Metadata(BaseModel):
    """The part of Kubernetes' metadata that is used; the rest passes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)]
    namespace: Name = "default"
    generation: int = 0


class ServingPlan(BaseModel):
    """A ServingPlan document, as `kubectl apply` takes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    api_version: Literal["kvantile.dev/v1alpha1"]
    kind: Literal["ServingPlan"]
    metadata: Metadata
    spec: ServingPlanSpec
    status: dict[str, Any] | None = None
