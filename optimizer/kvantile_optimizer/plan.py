"""The plan: what the optimizer decided, as the operator, the gateway and people read it.

The JSON is a contract (camelCase, the unit in each name, seconds, US dollars), so builder and parser are one model.
Pydantic is all that it needs: the gateway reads plans without the solver. What the parts mean is in docs/plan.md.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from kvantile_optimizer.spec import Match
from kvantile_optimizer.waiting import Order

PLAN_VERSION: Literal[1] = 1

Form = Literal["none", "held", "pooled"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class PlanStatus(StrEnum):
    """How the solve ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    """The time limit came first; `gap` says how far from proved it is."""
    INFEASIBLE = "infeasible"
    """Nothing can be served at all; `unserved` says why."""


class PlanModel(BaseModel):
    """Base of the plan's parts. Unknown keys pass: an older gateway reads a newer plan of the same version."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class PlanId(PlanModel):
    name: str
    namespace: str
    generation: int = 0


class PlanEngineModel(PlanModel):
    name: str
    served_name: str
    max_model_len: Annotated[int, Field(gt=0)]


class PlanSlo(PlanModel):
    ttft_seconds: Annotated[float, Field(gt=0)]
    tpot_seconds: Annotated[float, Field(gt=0)]
    percentile: Annotated[int, Field(ge=1, le=100)] = 99
    deadline_seconds: Annotated[float, Field(gt=0)] | None = None


class PlanClass(PlanModel):
    name: str
    default: bool = False
    match: list[Match] = []
    slo: PlanSlo
    requests_per_second: Annotated[float, Field(ge=0)] = 0.0
    radius: Annotated[float, Field(ge=0)] = 0.0
    """Radius of the Wasserstein ball, tokens."""


class PlanRouter(PlanModel):
    """What the gateway allows its clients."""

    allow_class_header: bool = False
    allow_hints: bool = False


class PlanCosts(PlanModel):
    gpu: float = Field(default=0.0, alias="gpuUSDPerHour")
    memory: float = Field(default=0.0, alias="memoryUSDPerHour")
    preemption: float = Field(default=0.0, alias="preemptionUSDPerHour")
    switching: float = Field(default=0.0, alias="switchingUSDPerHour")
    unserved: float = Field(default=0.0, alias="unservedUSDPerHour")


class StepTime(PlanModel):
    """T = alpha + beta * sequences + gamma * context tokens + delta * prefill tokens, seconds."""

    alpha: Annotated[float, Field(gt=0)]
    beta: Annotated[float, Field(ge=0)]
    gamma: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(ge=0)]


class Group(PlanModel):
    """Replicas of one kind."""

    name: str
    pool: str
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 2048
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Shorter than the model's where the KV pool is; the model's when absent."""
    replicas: Annotated[int, Field(ge=0)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_type: str = ""
    price_usd_per_hour: float = Field(default=0.0, alias="priceUSDPerHour")
    """Of all its replicas together."""
    kv_tokens: Annotated[int, Field(ge=1)]
    """Of one replica."""
    block_size: Annotated[int, Field(ge=1)] = 16
    tail_margin: Annotated[float, Field(ge=1)] = 1.0
    """P99 of KV use over its mean, as planned with."""
    capacity_ratio: Annotated[float, Field(gt=0)] = 1.0
    """What a replica is planned to take over what the closed forms allow: what a replay of the group has shown."""
    step_time: StepTime


class Route(PlanModel):
    """What share of a class goes to a group, and what is reserved for it there."""

    class_: str = Field(alias="class")
    group: str
    fraction: Fraction
    reserve_tokens: Annotated[int, Field(ge=0)]
    mean_tokens: Annotated[float, Field(ge=0)] = 0.0
    """Mean output of the class."""
    fractile: Fraction = 0.0
    """F(reserve), after rounding to blocks."""
    form: Form = "none"
    pooling_fraction: Fraction = 1.0
    order: Order = "fcfs"
    engine_seconds_per_request: float = 0.0
    kv_token_steps_per_request: float = 0.0
    idle_usd_per_token: Annotated[float, Field(ge=0)] | None = Field(default=None, alias="idleUSDPerToken")
    """c_o: what a token costs a request that is reserved and not used, as planned with."""
    shortage_usd_per_token: Annotated[float, Field(ge=0)] | None = Field(default=None, alias="shortageUSDPerToken")
    """c_u: what a token costs it that is used and not reserved."""
    shortage_usd: Annotated[float, Field(ge=0)] | None = Field(default=None, alias="shortageUSD")
    """c_f: what any shortage costs it besides."""
    priced_tokens: Annotated[int, Field(ge=0)] | None = None
    """What these prices alone would reserve; absent where no replay chose."""


class ResidentPrefix(PlanModel):
    class_: str = Field(alias="class")
    group: str
    tokens: int


class Prediction(PlanModel):
    class_: str = Field(alias="class")
    ttft_seconds: float
    tpot_seconds: float
    percentile: int
    preemption_probability: Fraction
    tpot_mean_seconds: float | None = None
    """Mean of the requests' times per further token; absent where the plan was not replayed."""


class GroupPrediction(PlanModel):
    group: str
    utilisation: float
    kv_mean_tokens: float
    kv_p99_tokens: float = Field(alias="kvP99Tokens")
    busy_fraction: float | None = None
    """Share of the time that a replica is in a step; absent where the plan was not replayed."""


class Unserved(PlanModel):
    class_: str = Field(alias="class")
    fraction: Fraction
    constraint: str
    """The row that stands in the way: `gpus`, `kv`, `tpot`, `ttft` or `weights`."""
    remedy: str
    """What would lift it, in words with a number."""


class HistoryEntry(PlanModel):
    block: str
    objective_usd_per_hour: float = Field(alias="objectiveUSDPerHour")


class Step(PlanModel):
    """One step on the way from the plan that runs to this one."""

    action: Literal["start", "route", "drain", "stop"]
    group: str
    plan: Literal["running", "target"]
    """Whose group is meant: a group that is replaced by one of its name is in both."""
    replicas: Annotated[int, Field(ge=0)]
    """Of the group after the step: those that exist after `start` and `stop`, those that take requests otherwise."""
    gpus_in_use: dict[str, int]
    """By pool, after the step, without what others take."""
    uncovered: list[str] = []
    """Classes that are without a ready group after the step, though they had one and will have one."""
    reason: str = ""


class Sensitivity(PlanModel):
    """What a plan for a slightly different world looks like, found by planning for it."""

    change: str
    """What is different, in words."""
    status: PlanStatus | Literal["unsolved"]
    """How that plan ended; `unsolved` where the time was over before there was one, and the figures are absent."""
    objective_usd_per_hour: float | None = Field(default=None, alias="objectiveUSDPerHour")
    delta_usd_per_hour: float | None = Field(default=None, alias="deltaUSDPerHour")
    """Change of the objective; below zero is cheaper."""
    unserved_fraction_delta: float | None = None
    """Change of the share of all requests that is not served."""
    gpus: int | None = None
    """In all groups of that plan."""


class Plan(PlanModel):
    """A plan; `to_json` and `from_json` are its contract."""

    version: Literal[1] = PLAN_VERSION
    plan: PlanId
    model: PlanEngineModel
    router: PlanRouter = PlanRouter()
    classes: Annotated[list[PlanClass], Field(min_length=1)]
    method: str = "exact"
    status: PlanStatus = PlanStatus.OPTIMAL
    objective_usd_per_hour: float = Field(default=0.0, alias="objectiveUSDPerHour")
    bound_usd_per_hour: float = Field(default=0.0, alias="boundUSDPerHour")
    gap: float = 0.0
    solve_seconds: float = 0.0
    seed: int = 0
    costs: PlanCosts = PlanCosts()
    groups: list[Group] = []
    routes: list[Route] = []
    resident_prefixes: list[ResidentPrefix] = []
    predictions: list[Prediction] = []
    group_predictions: list[GroupPrediction] = []
    unserved: list[Unserved] = []
    history: list[HistoryEntry] = []
    warnings: list[str] = []
    steps: list[Step] = []
    """How to get here from the plan that runs, where one was given."""
    sensitivities: list[Sensitivity] = []

    @model_validator(mode="after")
    def _refers_to_what_it_has(self) -> Self:
        classes, groups = {item.name for item in self.classes}, {group.name for group in self.groups}
        if len(classes) != len(self.classes):
            raise ValueError("classes of different names")
        if len(groups) != len(self.groups):
            raise ValueError("groups of different names")
        if sum(item.default for item in self.classes) != 1:
            raise ValueError("exactly one class with default: true")
        for route in self.routes:
            if route.class_ not in classes:
                raise ValueError(f"routes of classes that exist (found {route.class_})")
            if route.group not in groups:
                raise ValueError(f"routes to groups that exist (found {route.group})")
        return self

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data, in the contract's names."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, data: str | bytes) -> Plan:
        """Parses what `kvantile plan -o json` printed. Raises pydantic.ValidationError, which names the field."""
        return cls.model_validate_json(data)

    def group(self, name: str) -> Group:
        """The group of that name. Raises KeyError."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def routes_of(self, class_name: str) -> list[Route]:
        """The routes of a class that carry anything, in plan order."""
        return [route for route in self.routes if route.class_ == class_name and route.fraction > 0]

    @property
    def gpu_count(self) -> int:
        """GPUs in all groups."""
        return sum(group.gpus for group in self.groups)
