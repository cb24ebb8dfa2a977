"""Two microbatches side by side on devices that share every layer, simulated.

interleave_nvlink   time of both one after the other over that of a pair, which takes turns at every all-reduce, so that
                    one computes while the other's results are added up: Llama-3.1-8B on two H100, forward and backward,
                    4 samples of 1,024 tokens in each
interleave_pcie     the same on two L40S, whose link is PCIe
interleave_hidden_nvlink, interleave_hidden_pcie    share of the time of all-reduces that is hidden so
interleave_muxtune_nvlink, interleave_muxtune_pcie  the same as the first two in the order of MuxTune's algorithm 1

MuxTune's algorithm 1 (section 3.4.2): every group's graph is cut into subgraphs (`segment`): runs of frozen operators,
each with the all-reduce at its end, and every adapter by itself. Then Kahn's algorithm over all graphs at once
(`launch_order`): of the subgraphs that wait for nothing, those of the least depth come first, and of these the one that
computes longest is launched next. So the groups take turns, and the longest computations hide what is under way.

Seconds are the hardware table's; links are assumed: the table's values for NVLink and PCIe.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.divided import Graph, layer_graph
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.simulate.two_streams import Launch, Subgraph, between_sums, in_turns, run_order

MODEL, DEGREE, NUM_GROUPS = "llama-3.1-8b", 2, 2
LENGTHS = (1024,) * 4
DEVICES = {"nvlink": "h100", "pcie": "l40s"}


def measure_interleaved() -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    shape = ModelShape.from_config(find_shape(MODEL).config().to_dict(), MODEL)
    found = {}
    for link, device in DEVICES.items():
        cost = BackboneSetup(shape).cost(find_hardware(device), tensor_parallel=DEGREE)
        alone_s = paired_s = published_s = reduce_s = 0.0
        for is_forward in (True, False):
            graph = layer_graph(cost, LENGTHS, shape.num_layers, is_forward=is_forward)
            groups = [between_sums(graph, group) for group in range(NUM_GROUPS)]
            cut = [segment(graph, group) for group in range(NUM_GROUPS)]
            alone_s += run_order(one_after_another(groups), groups).makespan_s
            paired_s += run_order(in_turns(groups), groups).makespan_s
            published_s += run_order(launch_order(cut), cut).makespan_s
            reduce_s += sum(own.reduce_s for group in groups for own in group)
        found[f"interleave_{link}"] = alone_s / paired_s
        found[f"interleave_hidden_{link}"] = (alone_s - paired_s) / reduce_s
        found[f"interleave_muxtune_{link}"] = alone_s / published_s
    return found


def one_after_another(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    return [(g, i) for g, group in enumerate(groups) for i in range(len(group))]


def order_problems(order: Sequence[Launch], groups: Sequence[Sequence[Subgraph]]) -> list[str]:
    """The faults of a launch order; none if it launches everything once, after what it needs."""
    position = {launch: i for i, launch in enumerate(order)}
    every = set(one_after_another(groups))
    found = [] if len(position) == len(order) else ["a subgraph is launched twice"]
    found += [f"group {g} has no subgraph {i}" for g, i in position.keys() - every]
    found += [f"subgraph {i} of group {g} is never launched" for g, i in sorted(every - position.keys())]
    if found:
        return found
    return [
        f"subgraph {i} of group {g} is launched before {need}, which it needs"
        for (g, i), at in position.items()
        for need in groups[g][i].needs
        if position[g, need] > at
    ]


def segment(graph: Graph, group: int = 0) -> list[Subgraph]:
    """The subgraphs of one graph, in an order in which they could be launched."""
    members: list[list[int]] = []
    home: dict[int, int] = {}
    before: list[set[int]] = []
    """All subgraphs that come before each, however far."""
    is_open = -1
    for index, operator in enumerate(graph):
        needed = {home[need] for need in operator.needs}
        joins = is_open >= 0 and operator.kind != "adapter"
        # What waits for the open run by way of another subgraph cannot be part of it.
        joins = joins and not any(is_open in before[other] for other in needed if other != is_open)
        if not joins:
            members.append([])
            before.append(set())
        own = is_open if joins else len(members) - 1
        members[own].append(index)
        home[index] = own
        for other in needed - {own}:
            before[own] |= {other, *before[other]}
        if operator.kind == "frozen":
            is_open = own
        elif operator.kind == "reduce" or is_open in before[own]:
            is_open = -1
    return _in_order(graph, group, members, home)


def launch_order(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """Algorithm 1: the order in which the subgraphs of all groups are launched; ties by group and index."""
    waiting = {(g, i): len(own.needs) for g, group in enumerate(groups) for i, own in enumerate(group)}
    followers: dict[Launch, list[Launch]] = {}
    for g, group in enumerate(groups):
        for i, own in enumerate(group):
            for need in own.needs:
                followers.setdefault((g, need), []).append((g, i))
    ready = [_rank(groups, launch) for launch, count in waiting.items() if not count]
    heapq.heapify(ready)
    found: list[Launch] = []
    while ready:
        *_, launch = heapq.heappop(ready)
        found.append(launch)
        for follower in followers.get(launch, []):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, _rank(groups, follower))
    return found


def _rank(groups: Sequence[Sequence[Subgraph]], launch: Launch) -> tuple[int, float, Launch]:
    own = groups[launch[0]][launch[1]]
    return own.depth, -own.compute_s, launch


def _in_order(graph: Graph, group: int, members: list[list[int]], home: dict[int, int]) -> list[Subgraph]:
    """The subgraphs of those members, each after all that it needs."""
    needs = [{home[need] for index in own for need in graph[index].needs} - {i} for i, own in enumerate(members)]
    depths: dict[int, int] = {}
    # What a subgraph needs was begun before it, or while it was open by an adapter that needs what came before.
    left = list(range(len(members)))
    while left:
        known = [i for i in left if needs[i] <= depths.keys()]
        for i in known:
            depths[i] = 1 + max((depths[need] for need in needs[i]), default=-1)
        left = [i for i in left if i not in depths]
    order = sorted(depths, key=lambda i: (depths[i], members[i][0]))
    number = {i: new for new, i in enumerate(order)}
    found = []
    for i in order:
        operators = [graph[index] for index in members[i]]
        reduce_s = sum(operator.seconds for operator in operators if operator.kind == "reduce")
        compute_s = sum(operator.seconds for operator in operators) - reduce_s
        own_needs = tuple(sorted(number[need] for need in needs[i]))
        found.append(Subgraph(group, tuple(members[i]), compute_s, reduce_s, own_needs, depths[i]))
    return found
