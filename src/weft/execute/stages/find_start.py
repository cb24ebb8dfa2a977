"""Starts a job by EVA on all stages that have it: their coordinator's side of `stage_start.py`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.execute.stages.stage_group import StageGroup
from weft.execute.stages.stage_start import PassHeard

Heard = list[PassHeard | None]
"""What stages tell of a pass; None where there are no more samples."""


def find_start(stages: StageGroup, homes: Sequence[range], job: str, *, in_step: bool) -> None:
    """Has a job's first samples run through replicas, until all their stages have heard enough.

    `homes`: the stages of each replica that has the job. `in_step`: all stages share frozen weights.
    """
    is_found = False
    try:
        while not is_found:
            heard = _heard_in_step(stages, homes, job) if in_step else _heard(stages, homes, job)
            is_found = None in heard or all(each.is_enough for each in heard if each is not None)
    finally:
        devices = [device for own in homes for device in own]
        stages.ask_each("end_passes", dict.fromkeys(devices, (job, is_found)))


def _heard_in_step(stages: StageGroup, homes: Sequence[range], job: str) -> Heard:
    """One pass on devices of which none gathers weights alone, whether it has the job or not."""
    heard = stages.ask("hear_pass", job, None)
    return [heard[device] for own in homes for device in own]


def _heard(stages: StageGroup, homes: Sequence[range], job: str) -> Heard:
    """One pass through every replica, from stage to stage."""
    heard: Heard = []
    for own in homes:
        entering_TD = None
        for device in own:
            (found,) = stages.ask_each("hear_pass", {device: (job, entering_TD)})
            heard.append(found)
            if found is None:
                return heard
            entering_TD = found.left_TD
    return heard
