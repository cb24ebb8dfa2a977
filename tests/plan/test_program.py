"""Programs are read back from JSON as they were, and one device's turns are distinguished from anything else."""

from __future__ import annotations

import json

import pytest

from weft.errors import PlanError
from weft.plan.program import Backward, Forward, Measure, Program, Receive, Send, Step, Turn
from weft.plan.types import Microbatch, Segment

NOTHING = Microbatch(())
FIRST = Microbatch((Segment("a", 0, 0, 3), Segment("b", 2, 1, 4), Segment("a", 0, 1, 5)))
SECOND = Microbatch((Segment("b", 2, 2, 7),))
TURNS = [Turn(NOTHING, (Step("c", 4),)), Turn(FIRST, (Step("a", 0),)), Turn(SECOND)]
PIPELINE = Program(
    (SECOND,),
    (
        (Forward(0), Send(0, False, 1), Receive(0, True, 1), Backward(0), Measure("b", 2), Step("b", 2)),
        (Receive(0, False, 0), Forward(0), Backward(0), Measure("b", 2), Send(0, True, 0), Step("b", 2)),
    ),
)


def test_job_tokens_then_each_job_has_its_tokens():
    assert list(FIRST.job_tokens.items()) == [("a", 8), ("b", 4)]


def test_turns_when_made_into_a_program_then_come_back():
    program = Program.from_turns(TURNS)
    assert program.stages == ((Step("c", 4), Forward(0), Backward(0), Step("a", 0), Forward(1), Backward(1)),)
    assert program.turns == TURNS
    assert Program.from_turns([]).turns == []


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        ((Forward(0), Forward(1), Backward(0), Backward(1)), "Forward"),
        ((Forward(0), Step("a", 0), Backward(0)), "Forward"),
        ((Backward(0),), "Backward"),
    ],
    ids=["two under way", "a step between", "no forward"],
)
def test_turns_when_a_backward_does_not_follow_its_forward_then_refused(stage, what):
    with pytest.raises(PlanError, match=what):
        _ = Program((FIRST, SECOND), (stage,)).turns


def test_turns_when_the_program_is_a_pipelines_then_refused():
    with pytest.raises(PlanError, match="2 stages"):
        _ = PIPELINE.turns


@pytest.mark.parametrize("program", [Program.from_turns(TURNS), Program.from_turns([]), PIPELINE])
def test_program_when_written_as_json_then_reads_back_the_same(program):
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    assert hash(program) == hash(Program(program.microbatches, program.stages))


def test_program_when_written_by_an_earlier_version_then_reads_back_the_same():
    """Those name a slice of the stage's layers after each microbatch, which was always 0."""
    tree = PIPELINE.to_json()
    stages = [[[*i[:2], 0, *i[2:]] if i[0] not in ("measure", "step") else i for i in own] for own in tree["stages"]]
    assert stages[0][1] == ["send", 0, 0, False, 1]
    assert Program.from_json({"num_chunks": 1, **tree, "stages": stages}) == PIPELINE


@pytest.mark.parametrize(
    "change",
    [
        {"stages": [[["jump", 0, 0]]]},
        {"stages": [[["forward"]]]},
        {"stages": [[["forward", "0"]]]},
        {"stages": [[["step", 3, "b"]]]},
        {"stages": 7},
        {"microbatches": [[["a", 0, 0]]]},
        {"microbatches": [[["a", 0, 0, 1, 2]]]},
        {"stages": [[["forward", 0, 1]]]},
        {"stages": [[["send", 0, 1, False, 1]]]},
    ],
    ids=str,
)
def test_program_when_the_json_is_of_something_else_then_refused(change):
    with pytest.raises(PlanError, match="not a program"):
        Program.from_json({**PIPELINE.to_json(), **change})


@pytest.mark.parametrize("tree", [None, [], {}, {"stages": []}], ids=str)
def test_program_when_there_is_none_in_the_json_then_refused(tree):
    with pytest.raises(PlanError, match="not a program"):
        Program.from_json(tree)
