"""The operators of layers divided over devices, with what each waits for: what a device computes, and what it sends.

Adapters stand beside the frozen products whose input they share, and an `add` puts both together; where devices have
parts of a result, an all-reduce follows it. Seconds are those of `AnalyticCost`, which knows the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.plan.cost.analytic import AnalyticCost

Kind = Literal["frozen", "adapter", "reduce"]


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a graph."""

    name: str
    seconds: float
    kind: Kind
    needs: tuple[int, ...] = ()
    """Operators of the same graph that come first, by their places in it; all are before it."""


Graph = tuple[Operator, ...]


def layer_graph(cost: AnalyticCost, lengths: Sequence[int], num_layers: int, *, is_forward: bool) -> Graph:
    """One microbatch through so many layers, forward or backward."""
    seconds = cost.layer(lengths, is_forward=is_forward)
    weights, widths = _shares(cost, [w * d for w, d in cost.shape.linears.values()]), _widths(cost)
    pass_s = (seconds.passes + seconds.launches) / 2
    # Attention and MLP: two sites each, and what is computed between them.
    qkv, out, gates, down = range(4)
    halves = [(qkv, out, seconds.attention), (gates, down, 0.0)]
    if not is_forward:
        halves = [(last, first, between_s) for first, last, between_s in reversed(halves)]
    found: list[Operator] = []
    for layer in range(num_layers):
        for first, last, between_s in halves:
            for site, before_s, behind_s in ((first, pass_s, between_s), (last, 0.0, 0.0)):
                before = (len(found) - 1,) if found else ()
                name = f"{layer} {'/'.join(cost.shape.sites[site])}"
                added = []
                if seconds.adapters:
                    added.append(len(found))
                    found.append(Operator(f"{name} adapters", widths[site] * seconds.adapters, "adapter", before))
                added.append(len(found))
                found.append(Operator(name, before_s + weights[site] * seconds.products, "frozen", before))
                found.append(Operator(f"{name} add", behind_s, "frozen", tuple(added)))
            found.append(Operator(f"{name} all-reduce", seconds.reduces / 2, "reduce", (len(found) - 1,)))
    return tuple(found)


def _shares(cost: AnalyticCost, each: Sequence[int]) -> list[float]:
    """What of all linears each site has."""
    sizes = dict(zip(cost.shape.linears, each, strict=True))
    total = sum(sizes.values()) or 1
    return [sum(sizes[name] for name in site) / total for site in cost.shape.sites]


def _widths(cost: AnalyticCost) -> list[float]:
    chosen = cost.shape.chosen(cost.targets)
    return _shares(cost, [sum(shape) if name in chosen else 0 for name, shape in cost.shape.linears.items()])
