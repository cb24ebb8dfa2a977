"""The structured pipeline template: in which order buckets of fused tasks go through the stages.

All fused tasks of a bucket run one microbatch each within one clock of the pipeline. Problem: min makespan subject to
every stage holding at most its free bytes between forwards and backwards. Rules, in the spirit of 1F1B:

1. Buckets go by the time of a clock on the first stage, longest first: a shorter one fills the bubbles of a longer one.
2. The clocks of one bucket follow each other.
3. A stage runs a backward as soon as it is ready, and otherwise the next forward, as early as memory allows.

The first is `stream.slowest_first`, the third `orders.play`, as for any pipeline's program. The resulting order of each
stage is the template. Tests prove that memory stays in its limits, and, for equal stages, forward = backward and enough
memory, that the last stage never idles between its first forward and its last backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.fuse.tasks import FusedTask, Pipe
from weft.plan.pipeline.orders import Clock, Pass, play
from weft.plan.pipeline.stream import slowest_first


@dataclass(frozen=True, slots=True)
class Template:
    """The order of the buckets' clocks, one per microbatch, and the passes of each stage."""

    buckets: tuple[tuple[int, ...], ...]
    """Indices of the fused tasks in each bucket; buckets are in the order in which they run."""
    stages: tuple[tuple[Pass, ...], ...]

    @property
    def makespan_s(self) -> float:
        return max(passes[-1].end_s for passes in self.stages)


def build_template(fused: Sequence[FusedTask], buckets: Sequence[Sequence[int]], pipe: Pipe) -> Template:
    """The template of these buckets, for one global batch of every task."""
    costs = {bucket: _clock([fused[i] for i in bucket], pipe) for bucket in map(tuple, buckets)}
    if sorted(itertools.chain.from_iterable(costs)) != list(range(len(fused))):
        raise PlanError(
            f"buckets are {[list(b) for b in buckets]}; put each of {len(fused)} fused tasks in exactly one."
        )
    _check(costs.values(), pipe)
    ordered = slowest_first({bucket: clock.forward_s[0] for bucket, clock in costs.items()})
    clocks = [costs[bucket] for bucket in ordered for _ in range(pipe.num_microbatches)]
    stages = play(clocks, pipe.num_stages, pipe.free_bytes)
    return Template(tuple(ordered), tuple(map(tuple, stages)))


def fits_alone(fused: Sequence[FusedTask], pipe: Pipe) -> bool:
    """True if one clock of these fused tasks fits on every stage."""
    held = _clock(fused, pipe).held_bytes
    return pipe.free_bytes is None or all(h <= free for h, free in zip(held, pipe.free_bytes, strict=True))


def _clock(fused: Sequence[FusedTask], pipe: Pipe) -> Clock:
    stages = range(pipe.num_stages)
    return Clock(
        forward_s=tuple(sum(pipe.forward_s(f, s) for f in fused) for s in stages),
        backward_s=tuple(sum(pipe.backward_s(f, s) for f in fused) for s in stages),
        held_bytes=tuple(sum(pipe.cost.held_bytes(f.lengths, s) for f in fused) for s in stages),
        transfer_s=pipe.cost.transfer_s(sum(f.num_tokens for f in fused)),
        step_s=(0.0,) * pipe.num_stages,
    )


def _check(clocks: Iterable[Clock], pipe: Pipe) -> None:
    for clock in clocks:
        for stage, free in enumerate(pipe.free_bytes or ()):
            if clock.held_bytes[stage] > free:
                raise PlanError(
                    f"stage {stage} has {free} bytes free and one clock holds {clock.held_bytes[stage]}; "
                    "use more buckets or smaller microbatches."
                )
