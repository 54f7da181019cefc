"""How each process of the fleet is started: a plan's group as the emulator's flags, the gateway's own flags.

Pure, and the one place that knows the servers' command lines. Servers are named by module and never imported: the
optimizer's package knows nothing of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvantile_optimizer.local.supervise import Command
from kvantile_optimizer.plan import Group, Plan
from kvantile_optimizer.waiting import Order

GATEWAY_MODULE = "kvantile_router"
EMULATOR_MODULE = "kvantile_engine.emulator"


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


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica to be run: its group's name and the flags that make it what it is."""

    group: str
    arguments: tuple[str, ...]

    def command(self, number: int) -> Command:
        """How it is started, as the fleet's `number`th replica."""
        return Command(f"{self.group}-{number}", EMULATOR_MODULE, self.arguments)


def replicas(plan: Plan, settings: FleetSettings) -> list[Replica]:
    """Every replica of the plan, in plan order."""
    return [
        Replica(group.name, _emulator_arguments(plan, group, settings))
        for group in plan.groups
        for _ in range(group.replicas)
    ]


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
