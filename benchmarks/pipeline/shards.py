"""Shards on one GPU: other devices' slices come from pinned memory, which is slower than any link between GPUs.

shard_overlap    share of the time of gathering alone that a step does not take longer than with the whole model there
shard_bits       numbers of the adapters' gradients that differ between the two
The step is that of eight jobs in a microbatch of `capacity` tokens; half of every layer is gathered, forward and back.
"""

from __future__ import annotations

import torch

from benchmarks.clock import THOROUGH, Effort, release
from benchmarks.steps.regimes import BF16, MAIN_SHAPE, Workload
from benchmarks.steps.step import BenchJobs
from weft.adapters.frozen import FrozenWeight, quantise
from weft.kernels.timing import median_s
from weft.model.backbone import Backbone
from weft.model.random_model import make_backbone, random_weight
from weft.model.shards.peers import HostPeers
from weft.model.shards.sharing import share_layers
from weft.plan.cost.published_shapes import SHAPES, Shape

NUM_DEVICES = 2


def measure_shards(
    device: torch.device, shape: Shape = SHAPES[MAIN_SHAPE], capacity: int = 8192, effort: Effort = THOROUGH
) -> dict[str, float]:
    """A step with the whole model on the device, one that gathers it, and gathering alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    workload = Workload((16,) * 8, (capacity // 8, capacity // 8), capacity)
    backbone = make_backbone(shape, BF16, dtype, device, kernels="fused")
    whole_s, expected = _step(backbone, workload, effort)
    share_layers(backbone, HostPeers(0, NUM_DEVICES, device), lambda path: _drawn(backbone, path))
    release(device)
    shared_s, found = _step(backbone, workload, effort)
    ring = backbone.ring
    assert ring is not None

    def go_empty() -> None:
        ring.go_empty(back=False, then_back=True)
        ring.go_empty(back=True)

    gather_s = median_s(go_empty, device, warmups=effort.warmups, repeats=effort.repeats)
    differing = sum(int((mine != other).sum()) for mine, other in zip(found, expected, strict=True))
    return {
        "shard_overlap": 1 - (shared_s - whole_s) / gather_s,
        "shard_bits": float(differing),
        "shard_whole_s": whole_s,
        "shard_step_s": shared_s,
        "shard_gather_s": gather_s,
        "shard_gather_gb_s": ring.gathered_bytes / gather_s / 1e9,
    }


def _step(backbone: Backbone, workload: Workload, effort: Effort) -> tuple[float, list[torch.Tensor]]:
    """Seconds of a step, and the gradients of the first one."""
    jobs = BenchJobs(backbone, workload)
    try:
        backbone.launch(jobs.batch, jobs.row_tile).losses()
        grads = [group.grad.clone() for adapter in jobs.adapters for group in adapter.groups.values()]
        return median_s(jobs.step, backbone.device, **effort.times), grads
    finally:
        jobs.look()
        jobs.detach()


def _drawn(backbone: Backbone, path: str) -> FrozenWeight:
    """A linear's weight, drawn as it was when the model was built."""
    linear = backbone.linears[path]
    like = torch.empty(linear.frozen.shape, dtype=backbone.dtype, device="meta")
    return quantise(random_weight(like, f"{path}.weight", backbone.device), BF16.quantize)
