"""What all stages together are and have done, from what each of them tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from weft.engine.execute.protocol import MicrobatchOutcome, ReplicaFacts, StagedOutcome, StagedWork
from weft.kernels.adamw import Updated
from weft.parallel.stages.interpreter import StageOutcome
from weft.parallel.stages.routes import StepOf
from weft.plan.layout import copies


def facts_of(stages: list[ReplicaFacts], replicas: Sequence[range], shards: Sequence[int]) -> ReplicaFacts:
    """The facts of all replicas from those of their stages; the last one has the model's own configuration.

    `shards`: how many replicas share each copy of the frozen weights; empty: none do.
    """
    sizes = tuple(len(devices) for devices in replicas)
    return dataclasses.replace(
        stages[-1],
        modules=tuple(path for device in replicas[0] for path in stages[device].modules),
        backbone_bytes=sum(facts.backbone_bytes * facts.tensor for facts in stages),
        kernels=f"{stages[-1].kernels}; {_in_words(sizes, shards, stages[-1].tensor)}",
        replica_sizes=sizes,
        shards=tuple(shards),
    )


def _in_words(replica_sizes: Sequence[int], shards: Sequence[int], tensor: int) -> str:
    owners = copies(len(replica_sizes), shards)
    found = [] if len(owners) == 1 else [f"{len(owners)} replicas"]
    for word, numbers in (
        ("shards", [len(own) for own in owners]),
        ("stages", [replica_sizes[own.start] for own in owners]),
    ):
        if max(numbers) > 1:
            found.append(f"{', '.join(map(str, numbers))} {word}")
    if tensor > 1:
        found.append(f"{tensor} devices that share every layer")
    return " of ".join(found)


def program_outcome(work: StagedWork, stages: list[StageOutcome]) -> StagedOutcome:
    """What became of a program, from what each stage tells."""
    nothing = MicrobatchOutcome((), 0, 0.0, 0.0)
    found = {k: outcome for stage in stages for k, outcome in stage.microbatches.items()}
    microbatches = [found.get(k, nothing) for k in range(len(work.program.microbatches))]
    spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: (span.start_s, span.stage))
    steps: dict[StepOf, Updated] = {}
    for stage in stages:
        for step, updated in stage.steps.items():
            known = steps.get(step, updated)
            # What is no number counts as the largest.
            largest = max(known.largest, updated.largest, key=lambda size: (math.isnan(size), size))
            steps[step] = dataclasses.replace(known, largest=largest)
    return StagedOutcome(microbatches, steps, spans)
