"""A plan's group becomes the emulator's flags, and a fleet keeps what does not change."""

from __future__ import annotations

from pathlib import Path

from kvantile_optimizer.local import flags
from kvantile_optimizer.local.flags import FleetSettings
from kvantile_optimizer.local.fleet import difference
from tests.support.small_plan import make_group, make_plan


def value_of(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_a_replica_is_what_its_group_says() -> None:
    (replica,) = flags.replicas(make_plan(make_group(kv_tokens=4096)), FleetSettings(speed=5.0))
    assert value_of(replica.arguments, "--kv-tokens") == "4096"
    assert value_of(replica.arguments, "--served-model-name") == "small-model"
    assert value_of(replica.arguments, "--alpha") == "0.02"
    assert value_of(replica.arguments, "--speed") == "5.0"
    assert value_of(replica.arguments, "--max-model-len") == "4096"


def test_engines_admit_in_the_order_of_their_routes() -> None:
    plan = make_plan(make_group())
    for order in ("slack", "deadline", "fcfs"):
        routes = [route.model_copy(update={"order": order}) for route in plan.routes]
        (replica,) = flags.replicas(plan.model_copy(update={"routes": routes}), FleetSettings())
        assert value_of(replica.arguments, "--order") == order


def test_the_gateways_own_defaults_are_left_to_it() -> None:
    command = flags.gateway(Path("plan.json"), Path("replicas.json"), FleetSettings())
    assert "--queue-wait" not in command.arguments
    assert value_of(command.arguments, "--replicas") == "replicas.json"


def test_replicas_that_stay_the_same_are_kept() -> None:
    old = flags.replicas(make_plan(make_group("a", replicas=2), make_group("b")), FleetSettings())
    new = flags.replicas(make_plan(make_group("a", replicas=3)), FleetSettings())
    missing, leaving = difference(old, new)
    assert [replica.group for replica in missing] == ["a"]
    assert [replica.group for replica in leaving] == ["b"]


def test_a_replica_whose_flags_change_is_replaced() -> None:
    old = flags.replicas(make_plan(make_group(kv_tokens=4096)), FleetSettings())
    new = flags.replicas(make_plan(make_group(kv_tokens=8192)), FleetSettings())
    missing, leaving = difference(old, new)
    assert (missing, leaving) == (new, old)
