"""Small sweeps on a small device, and what brute force finds for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from weft.plan.cost.hardware import DEVICES, Hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.decoder import LayerForm
from weft.plan.sweep import Configuration
from weft.plan.sweep.cost import PackCost, SweepSetting

SHAPE = ModelShape("small", 64, 128, 2, 4, 2, 16, 256)
MIB = 2**20
PEER = ModelShape("qwen2.5-7b", 3584, 18944, 28, 28, 4, 128, 152064, form=LayerForm(has_qkv_bias=True))


def device(memory_mib: float) -> Hardware:
    """An A100's speed with little memory, so that few adapters fit together."""
    return replace(DEVICES["a100-40"], memory_bytes=int(memory_mib * MIB))


@st.composite
def sweeps(draw: st.DrawFn, most: int, most_gpus: int) -> tuple[list[Configuration], SweepSetting]:
    """Configurations and a setting in which each of them fits on all GPUs together at least."""
    configurations = [
        Configuration(
            f"c{i}",
            draw(st.sampled_from((4, 16, 64, 256))),
            draw(st.sampled_from((1, 2, 8))),
            draw(st.integers(1, 40)),
            draw(st.sampled_from((16, 40, 100))),
            forward_tokens=draw(st.sampled_from((0, 5000))),
        )
        for i in range(draw(st.integers(1, most)))
    ]
    # Rank 256 with its optimizer takes 9 MiB, a microbatch of 128 rows 1.3 MiB.
    memory = draw(st.sampled_from((12.0, 14.0, 25.0, 200.0)))
    num_gpus = draw(st.integers(1, most_gpus))
    return configurations, SweepSetting(SHAPE, device(memory), num_gpus, in_stages=draw(st.booleans()))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, size):
            left = [item for item in rest if item not in chosen]
            for others in partitions(left):
                yield [[first, *chosen], *others]


def best_by_force(cost: PackCost) -> float:
    """The shortest makespan over all packs, degrees and orders."""
    best = float("inf")
    for packs in partitions(range(len(cost.kind_of))):
        kinds = [[cost.kind_of[i] for i in pack] for pack in packs]
        options = [[(d, cost.price(pack, d)[0]) for d in cost.setting.degrees] for pack in kinds]
        for jobs in itertools.product(*options):
            for order in itertools.permutations(jobs):
                best = min(best, _listed_s(order, cost.setting.num_gpus, best))
    return best


def _listed_s(jobs: Sequence[tuple[int, float]], num_gpus: int, limit: float) -> float:
    """Jobs in this order, each on the GPUs that are free first."""
    free = [0.0] * num_gpus
    for degree, seconds in jobs:
        free.sort()
        end = free[degree - 1] + seconds
        if end >= limit:
            return float("inf")
        free[:degree] = [end] * degree
    return max(free)
