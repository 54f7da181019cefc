"""How each process of the fleet is started: a plan's group as an engine's flags, the gateway's own flags.

Pure, and the one place that knows the servers' command lines. Servers are named by module and never imported: the
optimizer's package knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvantile_optimizer.local.supervise import START_DEADLINE_S, Command
from kvantile_optimizer.plan import Group, Plan
from kvantile_optimizer.waiting import Order

GATEWAY_MODULE = "kvantile_router"
EMULATOR_MODULE = "kvantile_engine.emulator"
VLLM_MODULE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs. Its own module looks for a package by the name of vllm, which builds for CPUs do not have."""
PLUGIN_MODULE = "kvantile_engine"
SCHEDULER = "kvantile_engine.ReservationScheduler"
ORDER_VARIABLE = "KVANTILE_ENGINE_ORDER"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Vllm:
    """The real engine, as it is on this machine and as the spec wants it."""

    python: str
    """The interpreter of its environment."""
    environment: Mapping[str, str]
    """Variables of the replicas, which win over those that are set here."""
    arguments: tuple[str, ...] = ()
    """Flags of the replicas, which win over those of the plan."""
    keeps: bool = True
    """Whether reservations and order are the engine's too; else it is stock vLLM, which ignores what it is told."""
    devices: tuple[str, ...] = ()
    """GPUs for the replicas to share out; none where vLLM runs on something else."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a fleet runs on this machine."""

    host: str = "127.0.0.1"
    port: int = 0
    """The gateway's; 0 lets the kernel choose."""
    speed: float = 1.0
    """Engine seconds per second of the clock on the wall."""
    stream_interval: int = 1
    """Tokens per streamed chunk; more cost the machine less, and neither the first nor the last token comes later."""
    queue_wait_s: float | None = None
    """How long the gateway keeps a request waiting, engine seconds; the class's target for the first token if None."""
    queue_length: int | None = None
    """How many the gateway keeps waiting, per class; the gateway's default if None."""
    grace_s: float = 10.0
    """How long a process may drain, on the wall."""
    seed: int = 0
    start_deadline_s: float = START_DEADLINE_S
    """How long a replica may take until it listens, on the wall."""
    vllm: Vllm | None = None
    """The engine of the replicas; the emulator if None."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica to be run: its group's name and what makes it what it is."""

    group: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    gpus: int = 1


def replicas(plan: Plan, settings: FleetSettings) -> list[Replica]:
    """Every replica of the plan, in plan order."""
    return [_replica(plan, group, settings) for group in plan.groups for _ in range(group.replicas)]


def command(replica: Replica, number: int, settings: FleetSettings, devices: Sequence[str] = ()) -> Command:
    """How a replica is started, as the fleet's `number`th, on these GPUs where there are any."""
    started = Command(
        f"{replica.group}-{number}",
        EMULATOR_MODULE,
        replica.arguments,
        environment=replica.environment,
        start_deadline_s=settings.start_deadline_s,
    )
    if settings.vllm is None:
        return started
    shown = ((DEVICES_VARIABLE, ",".join(devices)),) if devices else ()
    return replace(
        started,
        module=VLLM_MODULE,
        python=settings.vllm.python,
        environment=(*replica.environment, *shown),
        folder_variable=METRICS_VARIABLE if settings.vllm.keeps else None,
        health_host=settings.host,
    )


def check(engine: Vllm) -> tuple[list[str], dict[str, str]]:
    """What says whether the engine can be started, and the variables it needs besides ours."""
    # Without the plug-in any version will do.
    tolerant = {} if engine.keeps else {"KVANTILE_ENGINE_UNKNOWN_VERSION": "stock"}
    return [engine.python, "-P", "-m", PLUGIN_MODULE, "installed"], {**engine.environment, **tolerant}


def _replica(plan: Plan, group: Group, settings: FleetSettings) -> Replica:
    engine = settings.vllm
    if engine is None:
        return Replica(group.name, _emulator_arguments(plan, group, settings))
    order = {ORDER_VARIABLE: _order(plan, group)} if engine.keeps else {}
    return Replica(
        group.name,
        (*_vllm_arguments(plan, group, settings, keeps=engine.keeps), *engine.arguments),
        tuple({**order, **engine.environment}.items()),
        group.tensor_parallel * group.pipeline_parallel,
    )


def _vllm_arguments(plan: Plan, group: Group, settings: FleetSettings, *, keeps: bool) -> tuple[str, ...]:
    flags = {
        "--model": plan.model.name,
        "--served-model-name": plan.model.served_name,
        "--host": settings.host,
        "--tensor-parallel-size": group.tensor_parallel,
        "--pipeline-parallel-size": group.pipeline_parallel,
        "--block-size": group.block_size,
        "--max-num-seqs": group.max_num_seqs,
        "--max-num-batched-tokens": group.max_num_batched_tokens,
        "--max-model-len": group.max_model_len or plan.model.max_model_len,
        # vLLM breaks open answers off unless it is given time.
        "--shutdown-timeout": int(settings.grace_s),
        "--scheduler-cls": SCHEDULER if keeps else None,
    }
    return _flat(flags)


def _emulator_arguments(plan: Plan, group: Group, settings: FleetSettings) -> tuple[str, ...]:
    step = group.step_time
    flags = {
        "--model": plan.model.name,
        "--served-model-name": plan.model.served_name,
        "--host": settings.host,
        "--kv-tokens": group.kv_tokens,
        "--block-size": group.block_size,
        "--max-num-seqs": group.max_num_seqs,
        "--max-num-batched-tokens": group.max_num_batched_tokens,
        "--max-model-len": group.max_model_len or plan.model.max_model_len,
        "--alpha": step.alpha,
        "--beta": step.beta,
        "--gamma": step.gamma,
        "--delta": step.delta,
        "--speed": settings.speed,
        "--stream-interval": settings.stream_interval,
        "--order": _order(plan, group),
        "--seed": settings.seed,
    }
    return _flat(flags)


def _order(plan: Plan, group: Group) -> Order:
    """The order in which the group's engines admit: its routes'. Requests say whether they have a target at all."""
    return next((route.order for route in plan.routes if route.group == group.name), "fcfs")


def gateway(plan_file: Path, replicas_file: Path, settings: FleetSettings) -> Command:
    """How the gateway is started."""
    flags = {
        "--plan": plan_file,
        "--replicas": replicas_file,
        "--host": settings.host,
        "--speed": settings.speed,
        "--queue-wait": settings.queue_wait_s,
        "--queue-length": settings.queue_length,
    }
    return Command("gateway", GATEWAY_MODULE, _flat(flags))


def _flat(flags: dict[str, object]) -> tuple[str, ...]:
    return tuple(part for flag, value in flags.items() if value is not None for part in (flag, str(value)))
