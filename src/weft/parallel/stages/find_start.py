"""Starts a job by EVA on all stages that have it: their coordinator's side of `stage_start.py`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.parallel.stages.stage_group import StageGroup
from weft.parallel.stages.stage_start import StagePassResult

Heard = list[StagePassResult | None]
"""What stages tell of a pass; None where there are no more samples, or where others have the job."""


def find_start(stages: StageGroup, owners: Sequence[Sequence[range]], job: str) -> None:
    """Has a job's first samples run through replicas, until all their stages have heard enough.

    `owners`: of each copy of the frozen weights, the stages of the replicas that share it, of which one has the job.
    """
    is_found = False
    try:
        while not is_found:
            heard = [each for together in owners for each in _heard(stages, together, job)]
            is_found = not heard or all(each.is_enough for each in heard)
    finally:
        devices = [device for together in owners for own in together for device in own]
        stages.call_each("end_passes", dict.fromkeys(devices, (job, is_found)))


def _heard(stages: StageGroup, together: Sequence[range], job: str) -> list[StagePassResult]:
    """One pass through replicas of which none gathers weights alone, from stage to stage; nothing once it is over."""
    heard: list[StagePassResult] = []
    entering: Heard = [None] * len(together)
    for devices in zip(*together, strict=True):
        left = [None if found is None else found.left_TD for found in entering]
        given = {device: (job, left_TD) for device, left_TD in zip(devices, left, strict=True)}
        entering = stages.call_each("hear_pass", given)
        heard += [each for each in entering if each is not None]
    return heard
