"""Which layouts are worth planning with.

A replica fits into a machine or takes whole machines, so that replicas leave no odd GPUs: tensor-parallel degrees are
powers of two, and a layout's GPUs divide those of a machine or are a multiple of them. On a single machine of few GPUs
any number will do, because what one replica leaves another can take.

A kind is left out if another of as many GPUs and of no more stages is at least as fast for every bucket. Putting the
other one in its place makes no plan slower, so that the best plan stays. LobRA's own rule keeps a kind only if it is
the fastest of its size for some bucket; it relies on all kinds being ordered alike at every length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.plan.bucket import Buckets
from weft.plan.deploy.types import ReplicaKind
from weft.plan.layout import ReplicaLayout

FEW = 8
"""GPUs of a single machine up to which replicas may be of any size; beyond it there would be too many layouts."""


def possible_layouts(num_gpus: int, gpus_per_machine: int, num_layers: int, num_heads: int) -> list[ReplicaLayout]:
    """All layouts of a backbone on a cluster of alike machines, small ones first."""
    found = []
    is_small = num_gpus == gpus_per_machine <= FEW
    tensor = 1
    while tensor <= min(num_gpus, num_heads):
        for stages in range(1, min(num_layers, num_gpus // tensor) + 1):
            size = tensor * stages
            if is_small or gpus_per_machine % size == 0 or size % gpus_per_machine == 0:
                found.append(ReplicaLayout(tensor=tensor, stages=stages))
        tensor *= 2
    return sorted(found, key=lambda layout: (layout.num_devices, layout.tensor))


def without_dominated(kinds: Sequence[ReplicaKind], buckets: Buckets) -> list[ReplicaKind]:
    """The kinds that no other makes superfluous, in their order; of equals the first stays."""
    rates = [kind.model.costs(buckets).sample_s_R for kind in kinds]

    def beats(one: int, other: int) -> bool:
        a, b = kinds[one], kinds[other]
        is_alike = (a.pool, a.num_gpus) == (b.pool, b.num_gpus) and a.layout.stages <= b.layout.stages
        if not (is_alike and bool(np.all(rates[one] <= rates[other]))):
            return False
        is_equal = a.layout.stages == b.layout.stages and bool(np.all(rates[one] == rates[other]))
        return not is_equal or one < other

    chosen = [i for i in range(len(kinds)) if not any(beats(j, i) for j in range(len(kinds)) if j != i)]
    return [kinds[i] for i in chosen if np.isfinite(rates[i]).any()]
