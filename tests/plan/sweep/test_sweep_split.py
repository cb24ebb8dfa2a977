"""A group's configurations are cut into packs as well as any cuts of the same orders could."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from sweep_cases import sweeps

from weft.plan.sweep.cost import PackCost
from weft.plan.sweep.planner import Splitter


@settings(max_examples=25, deadline=None)
@given(sweeps(most=6, most_gpus=1))
def test_split_when_all_cuts_are_tried_then_none_is_shorter(case):
    cost = PackCost(*case)
    ranks = [kind.rank for kind in cost.kinds]
    orders = [
        sorted(cost.kind_of, key=lambda k: (-cost.steps[k], -ranks[k], k)),
        sorted(cost.kind_of, key=lambda k: (-ranks[k], -cost.steps[k], k)),
    ]
    n, best = len(cost.kind_of), float("inf")
    for order, size in itertools.product(orders, range(n)):
        for cuts in itertools.combinations(range(1, n), size):
            runs = itertools.pairwise((0, *cuts, n))
            best = min(best, sum(cost.price(order[a:b], 1)[0] for a, b in runs))
    split = Splitter(cost).split(cost.kind_of, 1)
    assert split.seconds == pytest.approx(best)
    assert sum(cut.seconds for cut in split.cuts) == pytest.approx(best)
    assert sorted(kind for cut in split.cuts for kind in cut.kinds) == sorted(cost.kind_of)
