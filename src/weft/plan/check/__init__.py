"""Validates any program, whoever made it; written without looking at any planner.

Checked on every stage: each microbatch forward and backward exactly once, forward first; exactly the transfers that the
stages before and after need, in time; a global batch's step exactly once, after its last backward and before the job's
next forward; with several stages, its measure between the two; memory never above the limit.
Between stages: what a neighbour sends is received in the same order, and a run of all lists together comes to its end;
those that are in step run their passes together, in the same directions.
Of a pair: two microbatches without a common job, whose forwards, and whose backwards, nothing comes between.
With several replicas, all of a microbatch is on one of them. Whoever had samples of a global batch measures it. A job
at home on a replica has all its samples there and steps there; one with order-independent sums steps on every replica.

Against the queues it was made for: every sample is known and has its length, each job's samples come, and go backward,
in its own order with none skipped, no microbatch holds samples of two lanes or a part of a group, and none is above the
capacity. Where sums do not depend on the order, the samples of a global batch may be in any order, each once. A global
batch that the program leaves unfinished has no step. Without queues every global batch counts as whole, and what has
samples on several replicas counts as order-independent. O(segments + instructions).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.check.batches import CheckedBatches, off_home_replica
from weft.plan.check.between import crossings, stuck
from weft.plan.check.pairs import not_side_by_side
from weft.plan.check.samples import misplaced, out_of_order, overfull, repeated, unknown_microbatches
from weft.plan.check.walk import StageWalk
from weft.plan.cost.types import CostModel
from weft.plan.layout import copies
from weft.plan.program import Program
from weft.plan.types import JobQueue, Limits


def violations(
    program: Program,
    queues: Sequence[JobQueue] | None = None,
    limits: Limits | None = None,
    *,
    cost: CostModel | None = None,
    memory_bytes: Sequence[int] | None = None,
) -> list[str]:
    """What is wrong with a program; empty if it may run.

    Samples and their order are checked where queues are given, capacity where limits are, memory where a cost model and
    each stage's bytes are.
    """
    if program.replica_sizes and (sum(program.replica_sizes) != program.num_stages or min(program.replica_sizes) < 1):
        return [f"replicas of {program.replica_sizes} stages are not the {program.num_stages} that are there"]
    if program.shards and not _can_share(program):
        return [f"shards of {program.shards} replicas are not those of {program.replica_sizes} stages that are there"]
    found = [*unknown_microbatches(program), *overfull(program, limits), *not_side_by_side(program)]
    found += repeated(program) if queues is None else [*out_of_order(program, queues), *misplaced(program, queues)]
    if found:
        return found
    batches = CheckedBatches(program, queues)
    found += off_home_replica(program, batches)
    for stage in range(program.num_stages):
        found += StageWalk(
            program, stage, batches, cost, None if memory_bytes is None else memory_bytes[stage]
        ).problems()
    return found or [*crossings(program), *stuck(program)]


def _can_share(program: Program) -> bool:
    """Whether every replica has one copy of the frozen weights, alone or with others of as many stages."""
    sizes, shards = program.replica_sizes, program.shards
    if min(shards) < 1 or sum(shards) != len(sizes):
        return False
    return all(len({sizes[replica] for replica in own}) == 1 for own in copies(len(sizes), shards))
