"""A job's state changes in one place, which records the change and returns its events."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tiny_models import shallow_backbone, small_job, submit

import weft.engine
from weft.engine.engine import Engine
from weft.engine.events import JobFailed, JobPaused, JobWaiting
from weft.job_state import JobState, Reason, ReasonCode

REASON = Reason(ReasonCode.NO_SEAT, "waits")


@pytest.fixture
def engine() -> Engine:
    """With a job that waits."""
    made = Engine(shallow_backbone("llama_odd"), capacity=48)
    submit(made, small_job("a"))
    return made


def test_status_when_searched_for_writers_then_only_transitions_assign_it():
    """Every other module requests changes there, so that all are recorded and reported."""
    writers = set()
    for path in Path(weft.engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Attribute) and target.attr == "status" for target in targets):
                writers.add(path.name)
    assert writers == {"live_job.py", "lifecycle.py"}, "the first makes it, the second changes it"


def test_job_when_it_waits_for_the_same_thing_again_then_it_is_reported_once(engine):
    """A job that is queued again is reported again."""
    job, transitions = engine.jobs["a"], engine._lifecycle.transitions
    assert transitions.report_waiting(job, REASON) == [JobWaiting("a", 0, REASON)]
    assert transitions.report_waiting(job, REASON) == []
    assert list(transitions.pause([job], None)) == [JobPaused("a", 0)]
    transitions.queue(job)
    assert job.state is JobState.QUEUED
    assert transitions.report_waiting(job, REASON) == [JobWaiting("a", 0, REASON)]


def test_job_when_it_has_ended_then_nothing_can_follow(engine):
    """A final state is final; a change after it is our own mistake."""
    job, transitions = engine.jobs["a"], engine._lifecycle.transitions
    assert transitions.fail(job, REASON) == [JobFailed("a", 0, REASON)]
    assert (job.state, job.reason) == (JobState.FAILED, REASON)
    with pytest.raises(AssertionError, match="final"):
        transitions.queue(job)
