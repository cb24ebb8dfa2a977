"""Jobs with any optimizer train beside each other as alone, and go on after a crash as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_models import Job, assert_same_bits, job_spec, random_data, shallow_backbone, train

from weft.engine.engine import Engine
from weft.store.run_dir import RunDirectory, RunRecord

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"optim": "adamw"},
    "lean": {"optim": "adamw_8bit"},
    "descent": {"optim": "sgd", "momentum": 0.9, "learning_rate": 0.05},
    "signs": {"optim": "lion", "learning_rate": 1e-3},
    "factors": {"optim": "adafactor"},
    "averaged": {"ema_decay": 0.7, "learning_rate_pattern": {"q_proj": 3.0}, "eval_data": 2, "eval_steps": 2},
    "turned": {"optim": "muon", "weight_decay": 0.1},
}


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def jobs() -> list[Job]:
    made = []
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        spec = job_spec(name, seed=seed, max_steps=6, save_steps=2, **settings)
        made.append((spec, random_data(seed, num_eval=spec.eval_data or 0)))
    return made


def test_jobs_when_every_optimizer_trains_at_once_then_each_has_the_bits_it_has_alone(backbone):
    together = train(backbone, jobs())
    for job in jobs():
        alone = train(backbone, [job])[job[0].name]
        assert alone.state == "succeeded" and alone.losses[-1] != alone.losses[0]
        assert_same_bits(together[job[0].name], alone)


def run_into(backbone: Any, path: Path, num_events: int | None) -> None:
    """Trains in a directory; after some events the engine is dropped, as a crash would drop it."""
    engine = Engine(backbone, capacity=64)
    is_new = not (path / "run.json").exists()
    with RunDirectory.open(path, resume=not is_new) as directory:
        if is_new:
            directory.write_run(RunRecord())
        engine.keep_in(directory)
        for spec, data in jobs():
            engine.submit(spec, data)
        for number, _ in enumerate(engine.events()):
            if number == num_events:
                return


def test_jobs_when_a_run_dies_then_it_goes_on_to_the_same_bytes_with_every_optimizer(backbone, tmp_path):
    run_into(backbone, tmp_path / "whole", None)
    for num_events in (20, 45, None):
        run_into(backbone, tmp_path / "died", num_events)
    for name in SETTINGS:
        kept = [sorted((tmp_path / run / name).rglob("*.safetensors")) for run in ("whole", "died")]
        assert len(kept[0]) > 1 and [p.relative_to(tmp_path / "whole") for p in kept[0]] == [
            p.relative_to(tmp_path / "died") for p in kept[1]
        ]
        for one, other in zip(*kept, strict=True):
            mine, others = load_file(one), load_file(other)
            assert mine.keys() == others.keys() and all(t.equal(others[key]) for key, t in mine.items())
