"""Which layers go to which stage.

Problem: cut layers in order into S runs to minimise the slowest run, subject to every run holding a layer. The output
head is counted into the last layer's time, so the last stage gets fewer layers. Dynamic programming over (stage, end),
O(S · layers²), exact; among equals the earlier stages take more. A stage's surplus over the mean is a bubble that no
order of microbatches removes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.errors import PlanError
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import CostModel


def split_layers(layer_s: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """How many layers each stage holds, from the seconds of every layer in order."""
    size = len(layer_s)
    if not 1 <= num_stages <= size:
        raise PlanError(f"{size} layers cannot be cut into {num_stages} stages; use 1 to {size}.")
    total = list(itertools.accumulate(layer_s, initial=0.0))
    # slowest[i]: the best cut of the layers from i on into the stages still to be filled; cuts remember its first end.
    slowest = [total[size] - total[i] for i in range(size)]
    cuts: list[list[int]] = []
    for left in range(2, num_stages + 1):
        ends = []
        for i in range(size - left + 1):
            options = [(max(total[j] - total[i], slowest[j]), -j) for j in range(i + 1, size - left + 2)]
            ends.append(min(options))
        slowest = [value for value, _ in ends]
        cuts.append([-j for _, j in ends])
    bounds = [0]
    for ends_of in reversed(cuts):
        bounds.append(ends_of[bounds[-1]])
    return tuple(end - start for start, end in itertools.pairwise([*bounds, size]))


def split_model(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """How many layers of a model each stage holds: by weights, the output head counted into the last layer."""
    weights = [float(shape.layer_weights)] * shape.num_layers
    weights[-1] += shape.head_weights
    return split_layers(weights, num_stages)


def layer_seconds(layers: CostModel, num_layers: int, lengths: Sequence[int]) -> list[float]:
    """Forward and backward of every layer over one microbatch, from a cost model with a stage for each layer."""
    return [layers.forward_s(lengths, layer) + layers.backward_s(lengths, layer) for layer in range(num_layers)]
