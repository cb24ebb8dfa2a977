"""What every PEFT method keeps: its files, its bits beside neighbours, its resume, and one forward however merged."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from covering import each_value
from tiny_models import (
    Job,
    Outcome,
    assert_same_bits,
    flat,
    job_spec,
    random_data,
    random_model,
    shallow_backbone,
    train,
)
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.method import Attachment, Method
from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.targets import leaf_names
from weft.engine.engine import Engine
from weft.engine.events import Event, MicrobatchDone, StepDone
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.weights import JobWeights
from weft.engine.inference.adapter_slots import LiveAdapter
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.inference.generate import Request, generate
from weft.methods.registry import METHODS
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.plan.cost.shape import ModelShape
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding
from weft.store.peft_files import read_adapter, write_adapter
from weft.store.run_dir import RunDirectory, RunRecord

CASES: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS} | {
    "bottleneck": {"method": "bottleneck", "bottleneck_size": 5},
    "diff_pruning": {"method": "diff_pruning", "density": 0.05},
    "prompt_tuning": {"method": "prompt_tuning", "num_virtual_tokens": 3},
    "prefix_tuning": {"method": "prefix_tuning", "num_virtual_tokens": 3},
    "diff_pruning_l0": {"method": "diff_pruning", "density": 0.05, "mask": "l0"},
}
"""Every method, with settings that suit a model of a few dozen features, and some once more with others."""
CASE_NAMES = sorted(CASES)
PATHS = ("reference", "fused")
VARIANTS: dict[str, dict[str, Any]] = {
    "lora_fa": {"method": "lora", "freeze_a": True},
    "pissa": {"method": "lora", "r": 4, "init_lora_weights": "pissa"},
    "eva": {"method": "dora", "r": 4, "init_lora_weights": "eva", "freeze_a": True},
    "token_rows": {
        "method": "dora", "r": 4, "trainable_token_indices": {"embed_tokens": (9, 4, 30, 5), "lm_head": (30, 7)}
    },
    "saved_modules": {"method": "lora", "r": 4, "modules_to_save": ("embed_tokens", "lm_head")},
}  # fmt: skip
"""Settings of a method that change which groups of parameters are trained, or what they start as."""
TARGETS = {Attachment.LINEAR: ("q_proj", "v_proj", "down_proj"), Attachment.BLOCK_OUTPUT: ("self_attn", "mlp")}


def method_of_case(case: str) -> Method:
    return METHODS[CASES[case]["method"]]


def settings_of(case: str) -> dict[str, Any]:
    """An adapter on some places of the method's kind."""
    own = {**CASES, **VARIANTS}[case]
    targets = TARGETS.get(METHODS[own["method"]].attachment)
    return own if targets is None else {"target_modules": targets, **own}


def changed_adapter(backbone: Backbone, case: str) -> Adapter:
    """An adapter whose weights are not those it starts with."""
    adapter = backbone.new_adapter(AdapterSpec(**settings_of(case)), 3)
    generator = torch.Generator().manual_seed(5)
    adapter.put({name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in adapter.flat().items()})
    return adapter


def written(backbone: Backbone, adapter: Adapter, path: Path) -> Path:
    names = leaf_names(adapter.modules, backbone.sites.shapes_for(adapter.method))
    assert names is not None
    write_adapter(
        path, adapter.spec, adapter.tensors(), base_model=backbone.name, target_names=names, shared=adapter.shared
    )
    return path


def logits(backbone: Backbone, slot: int | None) -> torch.Tensor:
    sample = random_data(1, num_samples=1, lengths=(12, 13)).train.samples[0]
    leading = backbone.leading_rows(slot)
    return backbone.logits(pack_samples([SlotSample(sample.led_by(leading), slot)], None, backbone.device))[leading:]


def plain_logits(model: Any) -> torch.Tensor:
    sample = random_data(1, num_samples=1, lengths=(12, 13)).train.samples[0]
    with torch.no_grad():
        # PEFT's prompts have logits too.
        return model(torch.from_numpy(sample.tokens.astype("int64"))[None]).logits[0][-sample.length :]


def me(case: str, **settings: Any) -> Job:
    settings = {"max_steps": 5, "eval_steps": 2, "eval_data": 3, "seed": 3, "learning_rate": 3e-2, **settings}
    return job_spec("me", adapter=settings_of(case), **settings), random_data(3, num_samples=10, num_eval=3)


def neighbours() -> list[Job]:
    """A LoRA with kernels, and a job of every method; all evaluate with me."""
    made = [(job_spec("lora", adapter={"r": 3, "lora_dropout": 0.2}, seed=8, eval_data=2), random_data(8, num_eval=2))]
    for number, case in enumerate(CASE_NAMES):
        spec = job_spec(f"other-{case}", adapter=CASES[case], seed=20 + number, global_batch_size=3)
        made.append((spec, random_data(20 + number, num_samples=7)))
    return made


@pytest.mark.parametrize("case", CASE_NAMES)
def test_files_when_written_and_read_then_the_adapter_is_the_same(case, tmp_path):
    backbone = shallow_backbone("llama_bias")
    adapter = changed_adapter(backbone, case)
    spec, tensors, config = read_adapter(written(backbone, adapter, tmp_path / "a"))
    assert (spec.method, config["peft_type"]) == (adapter.spec.method, adapter.method.files.peft_type)
    again = backbone.new_adapter(spec, 0)
    again.load(tensors, "a")
    assert all(x.equal(y) for x, y in zip(flat(again.tensors()), flat(adapter.tensors()), strict=True))


@pytest.mark.parametrize("case", [*CASE_NAMES, "lora_fa", "pissa"])
def test_live_copy_when_an_adapter_trains_then_writes_with_the_bits_of_its_file(case, tmp_path):
    backbone = shallow_backbone("llama_bias")
    adapter = changed_adapter(backbone, case)
    weights = JobWeights(job_spec("me", adapter=settings_of(case)), adapter)
    live = LiveAdapter("live", *weights.shown())
    copied, before = backbone.attach(live.on(backbone)), adapter.flat()
    expected = logits(backbone, attach_adapter(backbone, read_named(str(written(backbone, adapter, tmp_path / "a")))))
    for params in before.values():
        params.zero_()
    assert logits(backbone, copied).equal(expected), "training on does not change the copy"


@pytest.mark.parametrize("case", [name for name in CASE_NAMES if method_of_case(name).files.in_peft])
def test_files_when_peft_loads_them_then_it_computes_the_same(case, tmp_path):
    backbone, plain = shallow_backbone("llama_bias"), random_model("llama_bias", num_hidden_layers=1)
    plain.set_attn_implementation("eager")
    path = written(backbone, changed_adapter(backbone, case), tmp_path / "a")
    slot = attach_adapter(backbone, read_named(str(path)))
    theirs = plain_logits(peft.PeftModel.from_pretrained(copy.deepcopy(plain), path))
    torch.testing.assert_close(logits(backbone, slot), theirs, rtol=1e-4, atol=1e-5)
    assert (logits(backbone, slot) - logits(backbone, None)).abs().max() > 1e-2, "the adapter does nothing"


@pytest.mark.parametrize("case", [name for name in CASE_NAMES if method_of_case(name).attachment is Attachment.LINEAR])
def test_merge_when_done_then_the_plain_model_computes_what_the_slot_does(case):
    backbone, plain = shallow_backbone("llama_bias"), random_model("llama_bias", num_hidden_layers=1)
    plain.set_attn_implementation("eager")
    adapter = changed_adapter(backbone, case)
    with torch.no_grad():
        for path, tensors in adapter.tensors().items():
            linear = plain.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            adapter.method.merge(adapter.spec, path, (*tensors, *adapter.shared.values()), linear)
    slot = backbone.attach(adapter)
    torch.testing.assert_close(logits(backbone, slot), plain_logits(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "kernels"), [*product(CASE_NAMES, PATHS), *each_value(list(VARIANTS), PATHS)])
def test_job_when_others_train_beside_it_then_both_have_the_bits_they_have_alone(case, kernels):
    """On a fused backbone too, where a method without kernels has microbatches of its own; beside one of each kind of
    place. All methods beside each other are in the next tests."""
    backbone = shallow_backbone("llama_bias", kernels=kernels)
    others = [job for job in neighbours() if job[0].name in ("lora", "other-bottleneck", "other-prefix_tuning")]
    assert len(others) == 3
    alone = train(backbone, [me(case)])["me"]
    together = train(backbone, [me(case), *others])
    assert alone.state == "succeeded" and len(alone.eval_losses) == 3
    assert_same_bits(together["me"], alone)
    assert_same_bits(together["lora"], lora_alone(kernels))


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("case", ["lora", "pissa", "dora"])
def test_job_when_its_live_copy_answers_after_every_microbatch_then_has_the_bits_it_has_alone(case, kernels):
    backbone = shallow_backbone("llama_bias", kernels=kernels)
    alone = train(backbone, [me(case, ema_decay=0.5)])["me"]
    answers: list[list[int]] = []

    def answer(engine: Engine, event: Event) -> None:
        if isinstance(event, MicrobatchDone):
            executor = engine.executor
            assert isinstance(executor, LocalExecutor)
            slot = backbone.attach(LiveAdapter("live", *executor.jobs["me"].weights.shown()).on(backbone))
            answers.extend(generate(backbone, [Request([5, 6], slot)], Decoding(4)))
            backbone.detach(slot)

    assert_same_bits(train(backbone, [me(case, ema_decay=0.5)], on_event=answer)["me"], alone)
    assert len(answers) >= 5 and any(answers)


@functools.cache
def lora_alone(kernels: str) -> Outcome:
    return train(shallow_backbone("llama_bias", kernels=kernels), neighbours()[:1])["lora"]


def test_jobs_when_every_method_trains_in_one_run_then_each_has_the_bits_it_has_alone():
    backbone = shallow_backbone("llama_bias")
    jobs = neighbours()
    together = train(backbone, jobs)
    for job in jobs:
        assert_same_bits(together[job[0].name], train(backbone, [job])[job[0].name])


@pytest.mark.parametrize("case", CASE_NAMES)
def test_cost_when_counted_then_is_no_less_than_what_the_adapter_holds(case):
    """Weights as those of a LoRA of the stated rank on all linears; per row what its forward really keeps."""
    backbone = shallow_backbone("llama_bias")
    adapter = changed_adapter(backbone, case)
    shape = ModelShape.from_config(backbone.model.config.to_dict())
    assert adapter.num_parameters <= shape.adapter_parameters(adapter.method.cost_ranks(adapter.spec).widest)
    shapes, rows = backbone.sites.shapes_for(adapter.method), slot_rows(0, [Rows(0, 8)], None, 8)
    total = 0
    for path, weights in adapter.modules.items():
        num_out, num_in = shapes[path]
        kept = weights.forward(torch.ones(8, num_in), torch.ones(8, num_out), rows, Routing())
        width = adapter.method.saved_width(adapter.spec, path, shapes[path])
        assert sum(tensor.numel() for tensor in tensors_in(kept)) == 8 * width
        total += width
    if not adapter.method.has_kernels(adapter.spec):
        found = [backbone.activation_bytes(8, specs) for specs in ([adapter.spec], [])]
        assert found[0] - found[1] == 8 * 4 * total + adapter.method.workspace_bytes


def tensors_in(kept: Any) -> list[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    return [tensor for part in kept or () for tensor in tensors_in(part)]


@pytest.mark.parametrize("case", [*CASE_NAMES, *VARIANTS])
def test_job_when_its_batches_are_cut_otherwise_then_ends_with_the_same_bits(case):
    backbone = shallow_backbone("llama_bias")
    assert_same_bits(train(backbone, [me(case)], capacity=24)["me"], train(backbone, [me(case)], capacity=96)["me"])


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_jobs_when_one_of_each_method_holds_nan_then_only_those_fail(kernels):
    backbone = shallow_backbone("llama_bias", kernels=kernels)
    spoilt = {f"spoilt-{case}": me(case) for case in CASE_NAMES}
    jobs = [(dataclasses.replace(spec, name=name), data) for name, (spec, data) in spoilt.items()]

    def spoil(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job in spoilt:
            adapter = engine.executor.jobs[event.job].weights.adapter
            for group in adapter.groups.values():
                group.params[1] = math.nan
            adapter.changed()

    found = train(backbone, [*jobs, *neighbours()], on_event=spoil)
    assert {found.pop(name).state for name in spoilt} == {"failed"}
    undisturbed = train(backbone, neighbours())
    assert found.keys() == undisturbed.keys()
    for name, outcome in undisturbed.items():
        assert_same_bits(found[name], outcome)


@pytest.mark.parametrize("case", [*CASE_NAMES, *VARIANTS])
def test_job_when_resumed_from_its_checkpoint_then_ends_with_the_same_bits(case, tmp_path):
    backbone = shallow_backbone("llama_bias")
    job = me(case, save_steps=1, early_stopping_patience=9)
    whole = train(backbone, [job])["me"]
    for stop_after in (2, None):
        with RunDirectory.open(tmp_path / "run", resume=stop_after is None) as directory:
            if stop_after is not None:
                directory.write_run(RunRecord())
            engine = Engine(backbone, capacity=64)
            engine.keep_in(directory)
            engine.submit(*job)
            for event in engine.events():
                if isinstance(event, StepDone) and event.step == stop_after:
                    engine.stop()
    resumed = flat(engine.adapter_of("me"))
    assert all(x.equal(y) for x, y in zip(resumed, flat(whole.adapter), strict=True))
