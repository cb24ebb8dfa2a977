"""Training on a quantised backbone: it learns, jobs stay apart to the bit, and nothing mixes it up with another."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import chosen, each_value
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, random_sample, train

from weft.adapters.frozen import quantise
from weft.cli.demo import write_skill
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, Event, StepDone
from weft.engine.inference.attach import read_named
from weft.engine.inference.merge import merge_adapter
from weft.engine.resume import plan_resume
from weft.engine.train import execute_run, prepare_run
from weft.errors import CheckpointError, ConfigError
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.packed import SlotSample, pack_samples
from weft.model.path import Memory
from weft.spec import AdapterSpec, BackboneSpec, JobSpec, run_from_mapping
from weft.store.run_dir import RunDirectory

KINDS = ("fp8", "nf4", "int8")
SKILLS = ("sort", "add", "reverse", "next_letter", "double")
WORSE = {"fp8": 0.01, "nf4": 0.02, "int8": 0.002}
"""How far the mean eval loss over the skills may be from that of the plain backbone, relative to it."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantised(kind: str, name: str = "llama", dtype: torch.dtype = torch.float32) -> Backbone:
    backbone = random_backbone(name, dtype=dtype)
    for linear in backbone.linears.values():
        linear.frozen = quantise(linear.weight, kind)
    return backbone


@every_kind
def test_load_when_quantised_then_every_linear_but_the_head_is_and_nothing_else(kind):
    plain, backbone = (load_backbone(BackboneSpec("tiny", device="cpu", quantize=k)) for k in ("none", kind))
    assert backbone.dtype == torch.float32
    assert {linear.frozen.kind for linear in backbone.linears.values()} == {kind}
    stored = sum(linear.frozen.num_bytes for linear in backbone.linears.values())
    assert stored < 0.51 * sum(linear.frozen.num_bytes for linear in plain.linears.values())
    for name, tensor in plain.model.state_dict().items():
        if ".frozen." not in name:
            assert torch.equal(backbone.model.state_dict()[name], tensor)
    for path, linear in backbone.linears.items():
        error = (linear.weight - plain.linears[path].weight).norm() / plain.linears[path].weight.norm()
        assert 0 < error < 0.11


def test_load_when_fp8_products_do_not_take_a_shape_then_that_linear_stays_dense(tmp_path):
    """Of a model 36 wide no linear is a multiple of 16; one 48 wide has odd ones among others."""
    backbone = quantised("fp8", "llama_odd")
    assert {linear.frozen.kind for linear in backbone.linears.values()} == {"none"}
    mixed = random_backbone("llama", hidden_size=48, intermediate_size=50)
    kinds = {path.rsplit(".", 1)[-1]: quantise(linear.weight, "fp8").kind for path, linear in mixed.linears.items()}
    assert (kinds["o_proj"], kinds["up_proj"]) == ("fp8", "none")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("skills")
    return {skill: write_skill(folder / skill, skill, train=40, held=16) for skill in SKILLS}


def learnt(kind: str, data: dict[str, tuple[Path, Path]]) -> float:
    """The mean eval loss over the skills after eight steps, prompts included."""
    engine = Engine(load_backbone(BackboneSpec("tiny", device="cpu", quantize=kind)), capacity=512)
    for skill, (train_file, eval_file) in data.items():
        spec = JobSpec(
            skill,
            (str(train_file),),
            (str(eval_file),),
            adapter=AdapterSpec(r=8),
            train_on_inputs=True,
            max_steps=8,
            eval_steps=8,
            global_batch_size=4,
            max_length=128,
            learning_rate=2e-3,
        )
        engine.submit(spec)
    losses = [event.eval_loss for event in engine.events() if isinstance(event, EvalDone)]
    assert len(losses) == len(SKILLS)
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def plain_loss(data) -> float:
    loss = learnt("none", data)
    assert loss < 1.3, "the bare backbone is at about 2: it must have learnt something to compare with"
    return loss


@pytest.mark.parametrize("kind", chosen(KINDS, 1))
def test_training_when_the_backbone_is_quantised_then_learns_as_well(kind, data, plain_loss):
    """Over whole samples, as text has an entropy no model goes below: the answers alone are certain, their loss goes to
    zero, and any rounding moves it by per cents."""
    assert learnt(kind, data) == pytest.approx(plain_loss, rel=WORSE[kind])


def jobs() -> list[Job]:
    return [
        (
            job_spec(f"job{i}", adapter={"r": 2 + 3 * i, "lora_dropout": 0.2}, max_steps=3, seed=i, eval_data=2),
            random_data(i, num_samples=8, num_eval=2),
        )
        for i in range(3)
    ]


@pytest.mark.parametrize(("kind", "dtype"), each_value(KINDS, [torch.float32, torch.bfloat16]))
def test_job_when_others_train_beside_it_on_a_quantised_backbone_then_same_bits_as_alone(kind, dtype):
    backbone = quantised(kind, dtype=dtype)
    together = train(backbone, jobs(), capacity=100)
    for spec, own in jobs():
        assert together[spec.name].state == "succeeded"
        assert_same_bits(train(backbone, [(spec, own)])[spec.name], together[spec.name])


def gradients(kind: str, kernels: str) -> torch.Tensor:
    """All of two jobs' after one microbatch, on one of the paths."""
    backbone = quantised(kind)
    backbone.use_kernels(kernels, Memory())
    adapters = [backbone.new_adapter(AdapterSpec(r=r, init_lora_weights=False), r) for r in (2, 6)]
    rng = np.random.default_rng(3)
    slot_samples = [SlotSample(random_sample(rng, 40), backbone.attach(adapter), 1e-2) for adapter in adapters]
    backbone.forward_backward(pack_samples(slot_samples, 128, backbone.device), 128)
    return torch.cat([part for adapter in adapters for part in (adapter.groups["a"].grad, adapter.groups["b"].grad)])


@every_kind
def test_fused_step_when_the_backbone_is_quantised_then_its_gradients_are_the_references(kind):
    """But for FP8, where joined products share the scale of a row: within the error of one such number, 1 in 16."""
    fused, reference = gradients(kind, "fused"), gradients(kind, "reference")
    assert (fused - reference).norm() < (1 / 16 if kind == "fp8" else 1e-4) * reference.norm()


@every_kind
def test_neighbours_when_a_job_turns_nan_on_a_quantised_backbone_then_unharmed_and_it_fails(kind):
    backbone = quantised(kind)
    healthy = train(backbone, jobs())

    def damage(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("job1", 1):
            engine.executor.jobs["job1"].weights.adapter.groups["b"].params[5] = math.nan

    outcomes = train(backbone, jobs(), on_event=damage)
    assert outcomes["job1"].state == "failed"
    for name in ("job0", "job2"):
        assert_same_bits(outcomes[name], healthy[name])


@pytest.mark.parametrize(("before", "after"), [("none", "nf4"), ("nf4", "none"), ("fp8", "int8")])
def test_checkpoint_when_resumed_on_another_quantisation_then_refused(before, after, tmp_path):
    """Its adapter belongs to other weights; neither bits nor 1e-5 could be promised."""

    def engine(kind: str) -> Engine:
        made = Engine(quantised(kind), capacity=64)
        made.keep_in(tmp_path / "run")
        made.submit(job_spec("job", max_steps=4, save_steps=1), random_data(1))
        return made

    first = engine(before)
    finish(first, lambda own, event: own.stop() if isinstance(event, StepDone) and event.step == 2 else None)
    first._keeper.run_dir.close()
    with pytest.raises(CheckpointError, match=f"trained with quantize {before}, the backbone is loaded with {after}"):
        engine(after)


def test_run_when_resumed_with_another_quantisation_then_refused_before_anything_changes(tmp_path, data):
    tree = {
        "base_model": "tiny",
        "device": "cpu",
        "quantization": "int8",
        "jobs": [{"name": "sort", "train_data": str(data["sort"][0]), "max_steps": 1, "max_length": 128}],
    }
    spec = run_from_mapping(tree)
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        run = prepare_run(spec, base_dir=tmp_path)
        assert run.engine.executor.backbone.linears["model.layers.0.mlp.up_proj"].frozen.kind == "int8"
        execute_run(run, directory, on_event=lambda _: None)
        assert plan_resume(spec, directory).done == {"sort"}
        other = run_from_mapping({**tree, "quantization": "nf4"})
        with pytest.raises(ConfigError, match="has int8, this file has nf4") as caught:
            plan_resume(other, directory)
        assert caught.value.where == "quantize"


def test_merge_when_the_adapter_was_trained_on_a_quantised_backbone_then_goes_into_the_plain_weights(tmp_path, data):
    engine = Engine(BackboneSpec("tiny", device="cpu", quantize="nf4"), capacity=512)
    engine.keep_in(tmp_path / "run")
    engine.submit(JobSpec("sort", (str(data["sort"][0]),), max_steps=1, max_length=128, learning_rate=1e-2))
    engine.run()
    stored = read_named(str(tmp_path / "run" / "sort"))
    merge_adapter(stored, BackboneSpec("tiny", device="cpu", quantize="nf4"), tmp_path / "merged")
    plain = load_backbone(BackboneSpec("tiny", device="cpu"))
    merged = load_backbone(BackboneSpec(str(tmp_path / "merged"), device="cpu"))
    for path, (a_RD, b_OR) in stored.tensors.items():
        expected_OD = plain.linears[path].weight + stored.spec.scale_for(path) * (b_OR @ a_RD)
        torch.testing.assert_close(merged.linears[path].weight, expected_OD, rtol=0, atol=1e-6)
