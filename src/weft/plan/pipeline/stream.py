"""What a stream of microbatches promises about its jobs' global batches.

A stream is microbatches in the order of their forwards. A global batch, (job, step), is open from its first microbatch
to its last; after the last one's backward the job's optimizer steps, and only then may the job's next global batch be
forward. All orders of a pipeline follow from three facts worked out here, in O(segments): which steps a microbatch
completes, which backward a forward waits for, and where a pipeline that knows nothing of other jobs is emptied.

Streams in the order a published schedule wants them: rounds of one global batch of every job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weft.errors import PlanError
from weft.plan.types import Microbatch

StreamBatch = tuple[str, int]
"""Job and step."""


@dataclass(frozen=True, slots=True)
class BatchStream:
    """A stream's global batches; forwards, and backwards, keep its order on every stage."""

    microbatches: tuple[Microbatch, ...]
    members: dict[StreamBatch, tuple[int, ...]]
    """The microbatches that hold samples of a global batch, ascending."""
    waits_for: tuple[int, ...]
    """Per microbatch the last one whose backward, and steps, its forward needs; -1 for none. Always an earlier one."""

    @property
    def completes(self) -> dict[int, list[StreamBatch]]:
        """The global batches whose last microbatch this is."""
        ends: dict[int, list[StreamBatch]] = {}
        for batch in sorted(self.members):
            ends.setdefault(self.members[batch][-1], []).append(batch)
        return ends

    @property
    def flushes(self) -> tuple[int, ...]:
        """Where a classic schedule empties the pipeline: no global batch is open, or a job's next one begins."""
        last = [-1] * len(self.microbatches)
        for places in self.members.values():
            last[places[0]] = max(last[places[0]], places[-1])
        start, reach, found = 0, -1, []
        for place, end in enumerate(last):
            if self.waits_for[place] >= start:
                start = place
                found.append(place)
            reach = max(reach, end)
            if reach <= place:
                start = place + 1
                found.append(place + 1)
        return tuple(dict.fromkeys(found))


def read_stream(microbatches: Sequence[Microbatch]) -> BatchStream:
    """The stream of these microbatches; a PlanError if a job's batch begins before the one before is complete."""
    members: dict[StreamBatch, list[int]] = {}
    for place, microbatch in enumerate(microbatches):
        for batch in dict.fromkeys((s.job, s.step) for s in microbatch.segments):
            members.setdefault(batch, []).append(place)
    waits_for = [-1] * len(microbatches)
    before: dict[str, StreamBatch] = {}
    for batch in sorted(members):
        job, step = batch
        if job in before:
            previous = before[job]
            end, start = members[previous][-1], members[batch][0]
            if start <= end:
                raise PlanError(
                    f"step {step} of {job} has samples in microbatch {start}, and step {previous[1]} in {end}; "
                    "a global batch must be complete in the microbatches before the next one's first."
                )
            for place in members[batch]:
                waits_for[place] = max(waits_for[place], end)
        before[job] = batch
    frozen = {batch: tuple(places) for batch, places in members.items()}
    return BatchStream(tuple(microbatches), frozen, tuple(waits_for))


Bucket = TypeVar("Bucket", tuple[str, ...], tuple[int, ...])


def by_rounds(microbatches: Sequence[Microbatch]) -> tuple[Microbatch, ...]:
    """All jobs' first global batches, job after job, then all second ones: how mLoRA fills a pipe.

    Every microbatch must hold samples of one global batch alone.
    """
    queues: dict[str, dict[int, list[Microbatch]]] = {}
    for place, microbatch in enumerate(microbatches):
        owners = {(s.job, s.step) for s in microbatch.segments}
        if len(owners) != 1:
            raise PlanError(
                f"microbatch {place} holds samples of {len(owners)} global batches; "
                "this schedule takes microbatches of exactly one."
            )
        ((job, step),) = owners
        queues.setdefault(job, {}).setdefault(step, []).append(microbatch)
    per_job = [[batches[step] for step in sorted(batches)] for _, batches in sorted(queues.items())]
    rounds = itertools.zip_longest(*per_job, fillvalue=[])
    return tuple(microbatch for batches in rounds for batch in batches for microbatch in batch)


def by_template(
    microbatches: Sequence[Microbatch], latency_s: Callable[[Microbatch], float], *, keep_order: bool = False
) -> tuple[tuple[Microbatch, ...], tuple[int, ...]]:
    """MuxTune's template: in each round the slowest bucket first, a bucket's microbatches together.

    A bucket is the microbatches of one round with the same jobs, slowest first. To keep the order of every job's
    samples it is all that are linked by shared jobs, as they come. Returns the stream and the ends of its rounds.
    """
    rounds: dict[int, list[Microbatch]] = {}
    for microbatch, number in zip(microbatches, _round_numbers(microbatches), strict=True):
        rounds.setdefault(number, []).append(microbatch)
    stream: list[Microbatch] = []
    ends: list[int] = []
    for _, members in sorted(rounds.items()):
        buckets = _linked(members) if keep_order else _alike(members)
        slowest = {bucket: max(latency_s(m) for m in own) for bucket, own in buckets.items()}
        for bucket in slowest_first(slowest):
            own = buckets[bucket]
            stream.extend(own if keep_order else sorted(own, key=latency_s, reverse=True))
        ends.append(len(stream))
    return tuple(stream), tuple(ends)


def _jobs_of(microbatch: Microbatch) -> tuple[str, ...]:
    return tuple(sorted(microbatch.job_tokens))


def _alike(microbatches: Sequence[Microbatch]) -> dict[tuple[str, ...], list[Microbatch]]:
    """Microbatches by the jobs that they hold."""
    found: dict[tuple[str, ...], list[Microbatch]] = {}
    for microbatch in microbatches:
        found.setdefault(_jobs_of(microbatch), []).append(microbatch)
    return found


def _linked(microbatches: Sequence[Microbatch]) -> dict[tuple[str, ...], list[Microbatch]]:
    """Microbatches by jobs such that no job is in two buckets, each bucket in the given order."""
    groups: list[set[str]] = []
    for microbatch in microbatches:
        jobs = {*microbatch.job_tokens}
        touched = [group for group in groups if group & jobs]
        groups = [group for group in groups if not group & jobs] + [jobs.union(*touched)]
    return {tuple(sorted(group)): [m for m in microbatches if group & m.job_tokens.keys()] for group in groups}


def slowest_first(seconds: Mapping[Bucket, float]) -> list[Bucket]:
    """Buckets in a template's order: a shorter one fills the bubbles of a longer one before it. Ties by name."""
    return sorted(seconds, key=lambda bucket: (-seconds[bucket], bucket))


def _round_numbers(microbatches: Sequence[Microbatch]) -> list[int]:
    """Per microbatch the place of its global batches among those of their jobs; it must be one and the same."""
    members = read_stream(microbatches).members
    numbers: dict[tuple[str, int], int] = {}
    for job, batches in itertools.groupby(sorted(members), key=lambda batch: batch[0]):
        numbers |= {(job, step): number for number, (_, step) in enumerate(batches)}
    result: list[int] = []
    for place, microbatch in enumerate(microbatches):
        found = {numbers[s.job, s.step] for s in microbatch.segments}
        if len(found) != 1:
            raise PlanError(
                f"microbatch {place} holds samples of {len(found)} rounds; "
                "this schedule takes microbatches of exactly one."
            )
        result.extend(found)
    return result
