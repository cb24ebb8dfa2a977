"""Orders in which a device launches the operators of several groups: valid, and what they hide."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.pipeline.interleaved import launch_order, one_after_another, order_problems, segment
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.divided import Graph, Operator, layer_graph
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.simulate.two_streams import (
    Launch,
    Subgraph,
    between_sums,
    in_turns,
    run_order,
)

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict())
LENGTHS = (512, 300, 77)


def cost(device: str = "h100", degree: int = 2) -> AnalyticCost:
    return AnalyticCost(SHAPE, find_hardware(device), tensor_parallel=degree)


def random_graph(draw: random.Random, size: int) -> Graph:
    """Operators of all kinds that need any that came before."""
    found: list[Operator] = []
    for index in range(size):
        needs = tuple(sorted(draw.sample(range(index), min(index, draw.randint(1, 2)))))
        kind = draw.choice(["frozen", "frozen", "adapter", "reduce"]) if index else "frozen"
        found.append(Operator(str(index), draw.uniform(0.1, 1.0), kind, needs))  # type: ignore[arg-type]
    return tuple(found)


def random_groups(seed: int, size: int, count: int = 2) -> list[list[Subgraph]]:
    draw = random.Random(seed)
    return [segment(random_graph(draw, size), group) for group in range(count)]


def seconds(order: Sequence[Launch], groups: Sequence[Sequence[Subgraph]]) -> float:
    return run_order(order, groups).makespan_s


@pytest.mark.parametrize("is_forward", [True, False])
def test_layer_when_divided_then_its_seconds_are_those_of_the_cost_model(is_forward):
    """Nothing is lost, and all-reduces are the only thing that is sent."""
    graph = layer_graph(cost(), LENGTHS, 3, is_forward=is_forward)
    layer = cost().layer(LENGTHS, is_forward=is_forward)
    assert sum(operator.seconds for operator in graph) == pytest.approx(3 * layer.total)
    assert sum(operator.seconds for operator in graph if operator.kind == "reduce") == pytest.approx(3 * layer.reduces)
    assert sum(operator.kind == "adapter" for operator in graph) == 3 * 4
    assert all(need < index for index, operator in enumerate(graph) for need in operator.needs)


def test_segments_when_made_then_adapters_stand_alone_and_reduces_end_a_run():
    graph = layer_graph(cost(), LENGTHS, 2, is_forward=True)
    for own in segment(graph):
        kinds = [graph[index].kind for index in own.operators]
        assert kinds == ["adapter"] or "adapter" not in kinds
        assert "reduce" not in kinds[:-1]


@pytest.mark.parametrize("seed", range(30))
def test_segments_when_the_graph_is_random_then_all_operators_are_in_one_and_nothing_waits_for_itself(seed):
    graph = random_graph(random.Random(seed), 12)
    found = segment(graph)
    assert sorted(index for own in found for index in own.operators) == list(range(12))
    assert all(need < index for index, own in enumerate(found) for need in own.needs)
    total = sum(own.compute_s + own.reduce_s for own in found)
    assert total == pytest.approx(sum(operator.seconds for operator in graph))


@pytest.mark.parametrize("seed", range(30))
def test_orders_when_graphs_are_random_then_are_valid(seed):
    groups = random_groups(seed, 10, count=2 + seed % 2)
    assert order_problems(launch_order(groups), groups) == []


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("device", ["h100", "l40s"])
def test_turns_when_there_are_many_layers_then_beat_the_published_order_and_leave_little_to_hide(device, is_forward):
    """Nothing can take less time than all that computes, or all that is sent."""
    graph = layer_graph(cost(device), LENGTHS, 8, is_forward=is_forward)
    groups, cut = ([f(graph, group) for group in range(2)] for f in (between_sums, segment))
    order = in_turns(groups)
    assert order_problems(order, groups) == []
    one_by_one_s, published_s = (seconds(f(cut), cut) for f in (one_after_another, launch_order))
    assert seconds(order, groups) <= published_s < one_by_one_s
    compute_s = sum(own.compute_s for group in groups for own in group)
    reduce_s = sum(own.reduce_s for group in groups for own in group)
    assert max(compute_s, reduce_s) <= seconds(order, groups) < 1.1 * max(compute_s, reduce_s)


def test_turns_when_one_group_ends_early_then_the_other_goes_on():
    groups = [between_sums(layer_graph(cost(), LENGTHS, n, is_forward=True), n) for n in (1, 2)]
    assert in_turns(groups) == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda order: order[:-1], "never launched"),
        (lambda order: [*order, order[0]], "launched twice"),
        (lambda order: [*order[:-1], (5, 0)], "has no subgraph"),
        (lambda order: order[::-1], "which it needs"),
    ],
)
def test_order_when_it_is_wrong_then_is_found_out(change, problem):
    groups = random_groups(1, 8)
    assert any(problem in found for found in order_problems(change(launch_order(groups)), groups))
