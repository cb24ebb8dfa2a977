"""Checkpoints by time: one is due at the first step boundary at which the last has become old enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import job_spec, random_data, shallow_backbone

from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved, StepDone
from weft.store.run_dir import RunDirectory, RunRecord


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


@pytest.fixture
def saved_steps(backbone, tmp_path: Path, monkeypatch) -> Callable[..., list[int]]:
    """Trains eight steps of four minutes each, and returns those after which there was a checkpoint."""

    def train(*, leap_s: float = 0.0, **settings: float) -> list[int]:
        minutes, saved = 0, []
        engine = Engine(backbone, capacity=48)
        monkeypatch.setattr(engine.timeline, "own_s", lambda: 60.0 * minutes)
        with RunDirectory.open(tmp_path / "run", resume=False) as directory:
            directory.write_run(RunRecord())
            engine.keep_in(directory)
            engine.submit(job_spec("a", **{"max_steps": 8, "save_steps": 100, **settings}), random_data(1))
            for event in engine.events():
                if isinstance(event, StepDone):
                    minutes += 4
                    engine.timeline.offset_s += leap_s
                elif isinstance(event, CheckpointSaved):
                    saved.append(event.step)
        return saved

    return train


def test_checkpoint_when_nothing_is_set_then_one_is_written_every_ten_minutes_and_at_the_end(saved_steps):
    """Ten minutes are over after the third step, and again three steps after that."""
    assert saved_steps() == [3, 6, 8]


def test_checkpoint_when_minutes_are_zero_then_only_steps_count(saved_steps):
    """0 turns saving by time off."""
    assert saved_steps(save_minutes=0, save_steps=5) == [5, 8]


def test_checkpoint_when_one_was_written_by_steps_then_the_minutes_start_again(saved_steps):
    """What counts is the age of the last checkpoint, whatever it was written for."""
    assert saved_steps(save_minutes=12, save_steps=2) == [2, 4, 6, 8]


def test_checkpoint_when_a_restored_job_moves_the_runs_clock_then_it_is_not_due_earlier(saved_steps):
    """The seconds that a neighbour's run took before this process are not minutes of this job."""
    assert saved_steps(leap_s=36_000.0, save_minutes=20) == [5, 8]
