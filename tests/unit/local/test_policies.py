"""The compared policies differ in what is reserved and in nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer.local import policies
from kvantile_optimizer.workload import Lengths
from tests.support.small_plan import make_plan

LENGTHS = {name: Lengths.of(np.arange(1, 101), np.full(100, 0.01), 100, 100) for name in ("chat", "code")}


def test_every_policy_has_the_plans_groups_and_fractions() -> None:
    plan = make_plan()
    for variant in policies.variants(plan, LENGTHS).values():
        assert variant.groups == plan.groups
        assert [(route.class_, route.group, route.fraction) for route in variant.routes] == [
            (route.class_, route.group, route.fraction) for route in plan.routes
        ]


def test_kvantiles_routes_are_the_plans_own() -> None:
    plan = make_plan()
    assert policies.variants(plan, LENGTHS)[policies.KVANTILE].routes == plan.routes


def test_stock_reserves_nothing_and_serves_in_order_of_arrival() -> None:
    for route in policies.variants(make_plan(), LENGTHS)[policies.STOCK].routes:
        assert (route.form, route.order, route.reserve_tokens) == ("none", "fcfs", 0)


def test_the_fixed_quantile_is_held_and_rounded_up_to_a_block() -> None:
    for route in policies.variants(make_plan(), LENGTHS)[policies.P90_HELD].routes:
        assert (route.form, route.order, route.reserve_tokens) == ("held", "fcfs", 96)
        assert route.fractile == pytest.approx(0.96)
