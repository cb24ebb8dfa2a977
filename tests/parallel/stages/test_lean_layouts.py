"""Moments of 8 bits are those of one device under every layout that cuts no adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from staged_models import staged_executor, train_until
from test_sharded import LAYERS, sharded
from test_spread import engine_of
from tiny_models import job_spec, random_backbone, random_data

from weft.engine.engine import Engine
from weft.errors import ConfigError

LEAN = {"optim": "adamw_8bit", "max_steps": 8, "max_grad_norm": 0.05, "adapter": {"r": 3, "lora_dropout": 0.1}}


def test_run_when_resumed_under_layouts_of_whole_replicas_then_the_files_are_those_of_one_device(tmp_path):
    """At home and spread, from any of them to one device and back; buffers end within a block."""

    def whole() -> Engine:
        return Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48)

    jobs = [
        (job_spec(name, gradient_sum=sums, **LEAN), random_data(seed, num_samples=7))
        for seed, (name, sums) in enumerate({"a": "any_order", "b": "in_order", "c": "in_order"}.items())
    ]
    train_until(whole(), tmp_path / "one", 8, jobs)
    engines: list[Callable[[], Engine]] = [lambda: sharded(2)[0], whole, lambda: engine_of((LAYERS,), (LAYERS,)), whole]
    for index, engine in enumerate(engines):
        train_until(engine(), tmp_path / "moved", 2 * index + 2, jobs)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert len(files) >= 6
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


@pytest.mark.parametrize("replicas", [((1, 1),), ((2,), (1, 1))], ids=str)
def test_job_when_a_replica_is_cut_then_refused(replicas):
    """Also where it would begin on one that is whole: it may have to move."""
    engine = Engine(staged_executor("llama", *replicas), capacity=48)
    with pytest.raises(ConfigError, match="a border between two stages may cut") as found:
        engine.submit(job_spec("a", **LEAN), random_data(0))
    assert found.value.where == "optim" and not engine.jobs
