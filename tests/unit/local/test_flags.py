"""A plan's group becomes an engine's flags, and a fleet keeps what does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local import flags
from kvantile_optimizer.local.flags import FleetSettings, Vllm
from kvantile_optimizer.local.fleet import difference, shared_out
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.waiting import Order
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


def with_order(plan: Plan, order: Order) -> Plan:
    return plan.model_copy(update={"routes": [route.model_copy(update={"order": order}) for route in plan.routes]})


def make_vllm(**given: Any) -> Vllm:
    return Vllm(**{"python": "/opt/vllm/bin/python", "environment": {"PYTHONPATH": "/packages"}} | given)


def test_a_real_replica_is_what_its_group_says() -> None:
    group = make_group().model_copy(update={"tensor_parallel": 2, "pipeline_parallel": 3, "max_model_len": 2048})
    settings = FleetSettings(vllm=make_vllm(), grace_s=7.0, start_deadline_s=900.0)
    (replica,) = flags.replicas(with_order(make_plan(group), "deadline"), settings)
    assert value_of(replica.arguments, "--model") == "emulated"
    assert value_of(replica.arguments, "--served-model-name") == "small-model"
    assert value_of(replica.arguments, "--tensor-parallel-size") == "2"
    assert value_of(replica.arguments, "--pipeline-parallel-size") == "3"
    assert value_of(replica.arguments, "--max-num-seqs") == "64"
    assert value_of(replica.arguments, "--max-num-batched-tokens") == "2048"
    assert value_of(replica.arguments, "--max-model-len") == "2048"
    assert value_of(replica.arguments, "--block-size") == "16"
    assert value_of(replica.arguments, "--scheduler-cls") == "kvantile_engine.ReservationScheduler"
    assert value_of(replica.arguments, "--shutdown-timeout") == "7"
    assert replica.gpus == 6
    command = flags.command(replica, 4, settings, ("2", "3"))
    assert command.name == "l4-4"
    assert command.python == "/opt/vllm/bin/python"
    assert command.start_deadline_s == 900.0
    assert dict(command.environment) == {
        "PYTHONPATH": "/packages",
        "KVANTILE_ENGINE_ORDER": "deadline",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }
    assert command.folder_variable == "PROMETHEUS_MULTIPROC_DIR"


def test_the_specs_flags_and_variables_win() -> None:
    engine = make_vllm(arguments=("--block-size", "32"), environment={"KVANTILE_ENGINE_ORDER": "fcfs"})
    (replica,) = flags.replicas(make_plan(), FleetSettings(vllm=engine))
    assert replica.arguments[-2:] == ("--block-size", "32")
    assert dict(replica.environment) == {"KVANTILE_ENGINE_ORDER": "fcfs"}


def test_an_engine_that_is_only_advised_is_stock() -> None:
    settings = FleetSettings(vllm=make_vllm(keeps=False))
    (replica,) = flags.replicas(make_plan(), settings)
    assert "--scheduler-cls" not in replica.arguments
    command = flags.command(replica, 1, settings)
    assert dict(command.environment) == {"PYTHONPATH": "/packages"}
    assert command.folder_variable is None


def test_gpus_are_shared_out_to_whoever_needs_them() -> None:
    (one,) = flags.replicas(make_plan(), FleetSettings(vllm=make_vllm()))
    two = flags.Replica("wide", (), gpus=2)
    assert shared_out([one, two], ["0", "1", "2", "3"], {"1"}) == [("0",), ("2", "3")]
    assert shared_out([one, two], [], set()) == [(), ()]
    with pytest.raises(WorkError, match="3 GPUs are needed, and 2 of this machine's 4 are free"):
        shared_out([one, two], ["0", "1", "2", "3"], {"1", "2"})


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
