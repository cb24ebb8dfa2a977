"""Programs as JSON and back, so that a plan can be kept, sent and compared."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

from weft.plan.stages import Backward, Forward, Receive, Send, StagedProgram, StageInstruction, StageStep
from weft.plan.types import Microbatch, Segment

KINDS: dict[str, type[StageInstruction]] = {
    "forward": Forward,
    "backward": Backward,
    "send": Send,
    "receive": Receive,
    "step": StageStep,
}


def to_json(program: StagedProgram) -> str:
    """A program as text: instructions and segments as lists, in the order of their fields."""
    names = {kind: name for name, kind in KINDS.items()}
    document = {
        "num_chunks": program.num_chunks,
        "microbatches": [[astuple(segment) for segment in m.segments] for m in program.microbatches],
        "stages": [[[names[type(i)], *astuple(i)] for i in instructions] for instructions in program.stages],
    }
    return json.dumps(document)


def from_json(text: str) -> StagedProgram:
    """The program that `to_json` wrote."""
    document: dict[str, Any] = json.loads(text)
    return StagedProgram(
        tuple(Microbatch(tuple(Segment(*fields) for fields in segments)) for segments in document["microbatches"]),
        tuple(tuple(KINDS[name](*fields) for name, *fields in stage) for stage in document["stages"]),
        document["num_chunks"],
    )
