"""A replica that is lost while a job moves to another home, at any moment, costs no job its place or its bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from covering import each_value
from staged_models import part_backbones
from test_going_on import short
from tiny_models import assert_same_bits, finish, random_backbone, submit, train

from weft.engine.engine import Engine
from weft.engine.events import Event, JobWarning, StepDone
from weft.engine.execute.protocol import ReplicaLostError
from weft.parallel.stages.interpreter import StageOutcome
from weft.parallel.stages.stage import Stage, stage_places
from weft.parallel.stages.stage_group import GoingStage, LocalStages
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.types import LinearCost
from weft.plan.spread.planner import SpreadPlanner

ASKED = ("tensors", "add", "know_shares", "restore", "seat", "remove")
"""What stages are asked when a job moves."""


class LosableStages(LocalStages):
    """Two whole replicas of this process, of which one is lost, as a process is, at a moment of the first move.

    `again`: the other one is too, when the first has been made anew and its jobs are put there again.
    """

    def __init__(self, moment: int, *, is_old_home: bool, again: bool = False) -> None:
        super().__init__(part_backbones("llama", (2,)), part_backbones("llama", (2,)))
        self._moment, self._is_old_home = moment, is_old_home
        self._again = again
        self._lost: int | None = None
        self._error: ReplicaLostError | None = None
        self.asked: list[str] = []
        """Since the first job has begun to move, until a replica is lost."""

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Refused while a replica is gone; somebody else notices that it is, behind the question of the moment."""
        if self._error is not None:
            raise self._error
        found = super().ask_each(what, given)
        if self._lost is None and (what == "tensors" or self.asked):
            if not self.asked:
                (self._old_home,) = given
            self.asked.append(what)
            if len(self.asked) > self._moment:
                self._lost = self._old_home if self._is_old_home else 1 - self._old_home
                self._error = ReplicaLostError("a replica is gone.")
        elif self._lost is not None and self._again and what == "add":
            self._lost, self._again = 1 - self._lost, False
            self._error = ReplicaLostError("so is the other.")
        return found

    def outcomes(self, number: int) -> list[StageOutcome]:
        """Of those that live."""
        found = super().outcomes(number)
        if self._error is not None and self._lost is not None:
            self._error.answers = {1 - self._lost: found[1 - self._lost]}
            raise self._error
        return found

    def recover(self) -> list[int]:
        """Makes the lost one anew, with nothing on it."""
        lost = self._lost
        assert lost is not None
        self.stages[lost] = Stage(stage_places((1, 1))[lost], part_backbones("llama", (2,))[0], self._transports[lost])
        self._going[lost] = GoingStage(self.stages[lost])
        self._error = None
        return [lost]


@pytest.mark.parametrize(("moment", "is_old_home"), each_value(range(len(ASKED)), [False, True]))
def test_job_when_a_replica_is_lost_while_it_moves_then_has_a_place_and_the_bits_of_one_device(moment, is_old_home):
    """Where only the new home is gone, the job has lost no step."""
    stages = LosableStages(moment, is_old_home=is_old_home)
    told = trained_as_one_device(stages)
    assert stages.asked == [*ASKED[: moment + 1]], "every moment of a move is tried"
    assert next(event.message for event in told if isinstance(event, JobWarning)).startswith("a replica is gone.")
    steps = [(event.job, event.step) for event in told if isinstance(event, StepDone)]
    assert len(steps) == len({*steps}) or is_old_home or moment >= ASKED.index("seat")


def test_jobs_when_another_replica_is_lost_while_those_of_the_first_are_put_back_then_have_the_bits_of_one_device():
    told = trained_as_one_device(LosableStages(0, is_old_home=True, again=True))
    warnings = [event.message for event in told if isinstance(event, JobWarning)]
    assert [warning.partition(".")[0] for warning in warnings[:2]] == ["a replica is gone", "so is the other"]


def trained_as_one_device(stages: LosableStages) -> list[Event]:
    """What happens while jobs are trained, all to the bits of one device."""
    tokenizer: Any = None
    planner = SpreadPlanner((1, 1), (LinearCost(fixed_s=4.0),) * 2)
    engine = Engine(StagedExecutor(stages, tokenizer), capacity=48, planner=planner)
    # Two of three share a replica; when the third has ended, one of them has the other replica.
    jobs = [short("a", max_steps=6), short("b", 1, max_steps=6), short("c", 2, max_steps=1, global_batch_size=8)]
    submit(engine, *jobs)
    told: list[Event] = []
    found = finish(engine, lambda _, event: told.append(event))
    for name, outcome in train(random_backbone("llama", num_hidden_layers=2), jobs, capacity=48).items():
        assert_same_bits(found[name], outcome)
    return told
