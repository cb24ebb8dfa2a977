"""Launch orders are topological, never slower than one task after another, and hide communication."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.fusion import FusedOperator, Subgraph, interleave, segment, tensor_parallel_clock
from benchmarks.planning.fusion.interleave import order_by_depth, order_by_start, play, sequential_order
from benchmarks.planning.fusion.operators import tensor_parallel_chain
from weft.errors import PlanError


@st.composite
def graphs(draw: st.DrawFn, max_operators: int = 14) -> list[FusedOperator]:
    """Operators of up to three tasks; a need may cross tasks."""
    operators: list[FusedOperator] = []
    for i in range(draw(st.integers(1, max_operators))):
        names = [o.name for o in operators]
        after = draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
        kind = draw(st.sampled_from(["compute", "compute", "communication", "adapter"]))
        task = f"task{draw(st.integers(0, 2))}"
        seconds = float(draw(st.integers(0, 9)))
        is_send, is_adapter = kind == "communication", kind == "adapter"
        operators.append(FusedOperator(f"op{i}", task, seconds, is_send, is_adapter, tuple(after)))
    return operators


def replay(subgraphs: tuple[Subgraph, ...], order: tuple[int, ...]) -> float:
    """Two lanes second by second: each takes its next operator when all that it needs has ended."""
    launched = [o for number in order for o in subgraphs[number].operators]
    lanes = [[o for o in launched if o.is_communication == is_comm] for is_comm in (False, True)]
    ends: dict[str, float] = {}
    free = [0.0, 0.0]
    while any(lanes):
        lane = next(i for i, waiting in enumerate(lanes) if waiting and all(n in ends for n in waiting[0].after))
        operator = lanes[lane].pop(0)
        begin = max([free[lane], *(ends[n] for n in operator.after)])
        free[lane] = ends[operator.name] = begin + operator.seconds
    return max(free)


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_orders_any_graphs_are_topological_and_complete(operators: list[FusedOperator]) -> None:
    """Every rule launches every operator once, after all it needs."""
    subgraphs = segment(operators)
    assert sorted(o.name for s in subgraphs for o in s.operators) == sorted(o.name for o in operators)
    for rule in (order_by_depth, order_by_start, sequential_order):
        order = rule(subgraphs)
        seen: set[str] = set()
        for operator in (o for number in order for o in subgraphs[number].operators):
            assert seen.issuperset(operator.after)
            seen.add(operator.name)
        assert len(seen) == len(operators)
        assert play(subgraphs, order) == replay(subgraphs, order)


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_interleave_any_graphs_is_between_bound_and_sequential(operators: list[FusedOperator]) -> None:
    """Never slower than one task after another, never faster than the bound, and the time is that of the order."""
    result = interleave(operators)
    assert result.bound_s <= result.makespan_s <= result.sequential_s
    assert result.makespan_s == replay(result.subgraphs, result.order)
    assert result == interleave(operators)


@settings(max_examples=60, deadline=None)
@given(graphs(max_operators=6))
def test_interleave_few_subgraphs_is_near_the_best_of_all_orders(operators: list[FusedOperator]) -> None:
    """The bound holds for every topological order, and the answer is within twice the best."""
    result = interleave(operators)
    best = min(
        replay(result.subgraphs, order)
        for order in itertools.permutations(range(len(result.subgraphs)))
        if all(order.index(need) < order.index(i) for i, s in enumerate(result.subgraphs) for need in s.after)
    )
    assert result.bound_s <= best <= result.makespan_s <= 2 * best


def test_segment_layer_cuts_after_communication_around_adapters_and_between_tasks() -> None:
    """Runs of compute end with their all-reduce; an adapter, a branch and another task's operator stand alone."""
    operators = [
        FusedOperator("norm", "t", 1.0),
        FusedOperator("lora", "t", 1.0, is_adapter=True, after=("norm",)),
        FusedOperator("scale", "t", 1.0, after=("lora",)),
        FusedOperator("qkv", "t", 1.0, after=("norm",)),
        FusedOperator("branch", "t", 1.0, after=("norm",)),
        FusedOperator("out", "t", 1.0, after=("qkv", "scale")),
        FusedOperator("reduce", "t", 1.0, is_communication=True, after=("out",)),
        FusedOperator("mlp", "t", 1.0, after=("reduce",)),
        FusedOperator("fused", "u", 1.0, after=("mlp",)),
    ]
    subgraphs = segment(operators)
    names = [" ".join(o.name for o in s.operators) for s in subgraphs]
    assert names == ["norm qkv", "lora", "scale", "branch", "out reduce", "mlp", "fused"]
    assert [s.depth for s in subgraphs] == [0, 1, 2, 1, 3, 4, 5]
    assert [s.after for s in subgraphs] == [(), (0,), (1,), (0,), (0, 2), (4,), (5,)]


def test_order_by_depth_takes_turns_and_longest_first() -> None:
    """Two chains alternate, and at each depth the longer subgraph is launched first."""
    chains = [*tensor_parallel_chain("short", 2, 2.0, 2.0), *tensor_parallel_chain("long", 2, 6.0, 2.0)]
    subgraphs = segment(chains)
    assert [subgraphs[i].task for i in order_by_depth(subgraphs)] == ["long", "short", "long", "short"]


def test_interleave_two_chains_hides_all_but_the_ends() -> None:
    """Two equal chains of n blocks: only the last all-reduce is exposed, 2 n c + r; in turn all but one are."""
    operators = [o for task in "ab" for o in tensor_parallel_chain(task, 4, 4.0, 2.0)]
    result = interleave(operators)
    assert result.sequential_s == 11.5
    assert result.makespan_s == 8.5


def test_tensor_parallel_clock_one_task_hides_nothing_and_several_gain() -> None:
    """A task alone takes its time; two take less than their sum and not less than their compute."""
    clock = tensor_parallel_clock(communication_share=0.25, num_blocks=4)
    assert clock([8.0]) == pytest.approx(8.0)
    assert 12.0 < clock([8.0, 8.0]) < 13.0


def test_segment_bad_operators_raise_plan_error() -> None:
    """Circles, unknown needs, names used twice and negative times are named."""
    with pytest.raises(PlanError, match="circle: a, b"):
        segment([FusedOperator("a", "t", 1.0, after=("b",)), FusedOperator("b", "t", 1.0, after=("a",))])
    with pytest.raises(PlanError, match="a: needs 'x'"):
        segment([FusedOperator("a", "t", 1.0, after=("x",))])
    with pytest.raises(PlanError, match="2 operators have 1 names"):
        segment([FusedOperator("a", "t", 1.0)] * 2)
    with pytest.raises(PlanError, match=r"a: takes -1\.0 seconds"):
        segment([FusedOperator("a", "t", -1.0)])
