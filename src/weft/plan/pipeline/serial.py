"""Programs as plain values, which JSON can hold: for `weft plan --json`, and to compare plans.

A segment is [job, step, index, length]; an instruction is its kind and its fields in order, except that the microbatch
of a ForwardBackward is its place in `microbatches`, as for all instructions of pipelines.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from weft.plan.stages import Backward, Forward, Receive, Send, StagedProgram, StageInstruction, StageStep
from weft.plan.types import ForwardBackward, Microbatch, Program

KINDS: dict[type[StageInstruction], str] = {
    Forward: "forward",
    Backward: "backward",
    Send: "send",
    Receive: "receive",
    StageStep: "step",
}


def to_tree(program: Program | StagedProgram) -> dict[str, Any]:
    """A program as lists of lists; the engine's own has one stage."""
    if isinstance(program, StagedProgram):
        stages = [[[KINDS[type(i)], *astuple(i)] for i in instructions] for instructions in program.stages]
        microbatches: list[Microbatch] = list(program.microbatches)
        num_chunks = program.num_chunks
    else:
        microbatches, own, num_chunks = [], [], 1
        for i in program.instructions:
            if isinstance(i, ForwardBackward):
                own.append(["forward_backward", len(microbatches)])
                microbatches.append(i.microbatch)
            else:
                own.append(["step", i.job, i.step])
        stages = [own]
    segments = [[list(astuple(segment)) for segment in m.segments] for m in microbatches]
    return {"num_chunks": num_chunks, "microbatches": segments, "stages": stages}
