"""A job goes on from an adapter directory, with the shape it was trained in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import job_spec, random_data, shallow_backbone

from weft.engine.engine import Engine
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

SHAPE = {"r": 3, "lora_alpha": 5, "target_modules": ("q_proj", "down_proj"), "init_lora_weights": False}
STORED = AdapterSpec(r=3, lora_alpha=5, target_modules=("q_proj", "down_proj"), init_lora_weights=False)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """An adapter directory for the tiny Llama, written as PEFT does."""
    tensors = shallow_backbone().new_adapter(STORED, seed=9).tensors()
    write_adapter(tmp_path / "old", STORED, tensors, base_model="llama", target_names=["down_proj", "q_proj"])
    return tmp_path / "old"


def test_job_when_it_names_only_a_directory_then_takes_over_shape_and_weights(stored):
    engine = Engine(shallow_backbone(), capacity=64)
    spec = job_spec("next", init_adapter=str(stored), max_steps=2)
    object.__setattr__(spec, "adapter", AdapterSpec())
    engine.submit(spec, random_data(0))
    job = engine.jobs["next"]
    assert job.spec.adapter.r == 3
    assert job.notes == ()
    expected = shallow_backbone().new_adapter(STORED, seed=9).tensors()
    found = engine.executor.adapter_of("next")
    assert found.keys() == expected.keys()
    assert all(torch.equal(a, b) for path in found for a, b in zip(found[path], expected[path], strict=True))
    engine.run()
    assert job.state == "succeeded"


def test_job_when_the_adapter_was_trained_on_another_model_then_a_warning_reports_it(tmp_path):
    tensors = shallow_backbone().new_adapter(STORED, seed=9).tensors()
    write_adapter(tmp_path / "old", STORED, tensors, base_model="owner/other", target_names=["down_proj", "q_proj"])
    engine = Engine(shallow_backbone(), capacity=64)
    engine.submit(job_spec("next", init_adapter=str(tmp_path / "old"), adapter=SHAPE, max_steps=2), random_data(0))
    assert engine.jobs["next"].notes == ("next: init_adapter was trained on owner/other, not on llama.",)


def test_job_when_its_own_rank_differs_from_the_directory_then_reports_it(stored):
    engine = Engine(shallow_backbone(), capacity=64)
    spec = job_spec("next", adapter={"r": 4, "target_modules": ["q_proj", "down_proj"]}, init_adapter=str(stored))
    with pytest.raises(AdapterFileError, match="expected"):
        engine.submit(spec, random_data(0))
    assert not engine.jobs
