"""EVA starts an adapter from the job's own data and nothing else, in the directions that PEFT finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.eva import get_eva_state_dict
from tiny_models import (
    Job,
    assert_same_bits,
    attending_eagerly,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    submit,
    train,
)

from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.execute import eva as execute_eva
from weft.engine.execute.eva import MOST_PASSES, PASS_TOKENS, passes, principal_inputs
from weft.engine.inference.attach import attach_adapter, read_named
from weft.errors import ConfigError
from weft.methods.lora.config import EvaSpec
from weft.model.packed import SlotSample, pack_samples
from weft.parallel.stages.shares import refuse_indivisible
from weft.spec import AdapterSpec, JobSpec
from weft.store.run_dir import RunDirectory, RunRecord

EVA: dict[str, Any] = {"r": 4, "init_lora_weights": "eva"}


def me(**settings: Any) -> Job:
    spec = job_spec("me", seed=3, adapter={**EVA, "rank_pattern": {"v_proj": 6}}, **{"max_steps": 4, **settings})
    return spec, random_data(3, num_samples=30)


def projector(directions_RD: torch.Tensor) -> torch.Tensor:
    return directions_RD.t() @ directions_RD


def padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """A batch as transformers has it."""
    shape = len(samples), max(sample.length for sample in samples)
    ids, seen, labels = torch.zeros(shape).long(), torch.zeros(shape).long(), torch.full(shape, -100)
    for row, sample in enumerate(samples):
        tokens = torch.from_numpy(sample.tokens.astype("int64"))
        ids[row, : sample.length], seen[row, : sample.length] = tokens, 1
        labels[row, : sample.length] = torch.where(torch.from_numpy(sample.supervised.copy()), tokens, -100)
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


@pytest.mark.parametrize("use_label_mask", [True, False])
def test_directions_when_found_then_span_what_pefts_do(use_label_mask):
    """Two batches. At half of the features both decompose exactly; both sides' quick ways differ by their draws."""
    samples = list(random_data(7, num_samples=24, lengths=(8, 20)).train.samples)
    halves, backbone = [samples[:12], samples[12:]], random_backbone("llama_bias")
    ranks = {path: linear.in_features // 2 for path, linear in backbone.linears.items()}
    with attending_eagerly(random_model("llama_bias")) as model:
        config = LoraConfig(
            target_modules=sorted({path.rpartition(".")[2] for path in ranks}),
            rank_pattern=ranks,
            init_lora_weights="eva",
            eva_config=EvaConfig(rho=1.0, use_label_mask=use_label_mask),
        )
        # After the second batch any cosine will do.
        config.eva_config.tau = -1.0
        theirs = get_eva_state_dict(model, [padded(half) for half in halves], config, show_progress_bar=False)
    mine = principal_inputs(backbone, halves, ranks, EvaSpec(tau=1.0, use_label_mask=use_label_mask), seed=0)
    assert mine.keys() == theirs.keys()
    for path, directions_RD in mine.items():
        assert directions_RD.shape == theirs[path].shape
        torch.testing.assert_close(projector(directions_RD), projector(theirs[path].float()), rtol=0, atol=1e-4)
        torch.testing.assert_close(directions_RD @ directions_RD.t(), torch.eye(ranks[path]), rtol=0, atol=1e-5)


def test_files_when_peft_has_moved_ranks_then_are_read_with_the_same_logits(tmp_path):
    samples = list(random_data(7, num_samples=24, lengths=(8, 20)).train.samples)
    with attending_eagerly(random_model("llama_bias")) as model:
        settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="eva", eva_config=EvaConfig(rho=2.0))
        theirs = get_peft_model(model, settings, low_cpu_mem_usage=True)
        initialize_lora_eva_weights(theirs, [padded(samples)], show_progress_bar=False)
        with torch.no_grad():
            for name, weight in theirs.named_parameters():
                weight.add_(0.1 * torch.randn_like(weight) if "lora_B" in name else 0)
        theirs.save_pretrained(tmp_path / "a")
        tokens = torch.from_numpy(samples[0].tokens.astype("int64"))[None]
        expected = theirs(tokens).logits[0]
    stored, backbone = read_named(str(tmp_path / "a")), random_backbone("llama_bias")
    ranks = {len(a_RD) for a_RD, _ in stored.tensors.values()}
    assert len(ranks) > 1 and stored.spec.init_lora_weights is True
    batch = pack_samples([SlotSample(samples[0], attach_adapter(backbone, stored))], None, backbone.device)
    torch.testing.assert_close(backbone.logits(batch), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_job_when_it_has_neighbours_or_another_capacity_then_starts_and_ends_with_the_same_bits(kernels):
    alone = train(random_backbone("llama_bias", kernels=kernels), [me()])["me"]
    others = [(job_spec(f"other{i}", adapter=own, seed=i), random_data(i)) for i, own in enumerate([{}, EVA, {"r": 8}])]
    beside = train(random_backbone("llama_bias", kernels=kernels), [*others, me()])["me"]
    assert_same_bits(beside, alone)
    assert alone.state == "succeeded"


def test_start_when_the_job_gets_its_seat_then_follows_from_its_first_samples():
    backbone = random_backbone("llama_bias")
    executor = Engine(backbone, capacity=64).executor
    engine = Engine(executor, capacity=64)
    spec, data = me()
    engine.submit(spec, data)
    before = executor.adapter_of("me")
    executor.seat("me")
    samples = [data.train.samples[i] for step in range(4) for i in engine.jobs["me"].progress.order.batch(step)]
    ranks = {path: spec.adapter.rank_for(path) for path in backbone.linears}
    expected = principal_inputs(backbone, passes(samples), ranks, EvaSpec(), spec.seed)
    for path, (a_RD, b_OR) in executor.adapter_of("me").items():
        assert a_RD.equal(expected[path]) and not a_RD.equal(before[path][0]) and not b_OR.any()
        assert len(a_RD) == (6 if path.endswith("v_proj") else 4)


def test_job_when_resumed_then_does_not_look_again_and_ends_with_the_same_bits(tmp_path, monkeypatch):
    whole = train(random_backbone("llama_bias"), [me(save_steps=1)])["me"]
    record = RunRecord(base_model="llama_bias", capacity=64, jobs=("me",))

    def begun(resume: bool) -> Engine:
        engine = Engine(random_backbone("llama_bias"), capacity=64)
        directory = RunDirectory.open(tmp_path / "run", resume=resume)
        if not resume:
            directory.write_run(record)
        engine.keep_in(directory)
        submit(engine, me(save_steps=1))
        return engine

    first = begun(resume=False)
    for event in first.events():
        if getattr(event, "step", 0) == 2:
            first.stop()
    first.finish_files()
    first._keeper.run_dir.close()
    monkeypatch.setattr(execute_eva, "principal_inputs", lambda *_: pytest.fail("it looked again"))
    second = finish(begun(resume=True))["me"]
    assert all(
        x.equal(y) for path in whole.adapter for x, y in zip(second.adapter[path], whole.adapter[path], strict=True)
    )
    assert second.losses == whole.losses[2:]


def test_start_when_the_data_has_fewer_directions_than_the_rank_then_the_other_rows_start_as_ever():
    backbone = random_backbone("llama_bias")
    plain = backbone.new_adapter(AdapterSpec(r=4), 3).tensors()
    engine = Engine(backbone, capacity=64)
    engine.submit(job_spec("me", seed=3, adapter=EVA), random_data(3, num_samples=1, lengths=(4, 5)))
    engine.executor.seat("me")
    for path, (a_RD, _) in engine.executor.adapter_of("me").items():
        assert a_RD[-1].equal(plain[path][0][-1]) and a_RD[0].norm() == pytest.approx(1, abs=1e-5)


def test_passes_when_there_is_more_data_than_is_looked_at_then_are_the_first_in_order():
    samples = [Sample([3] * 1500, [True] * 1500) for _ in range(3 * MOST_PASSES)]
    cut = list(passes([Sample([3] * 5000, [True] * 5000), *samples]))
    assert [len(each) for each in cut] == [1, *[2] * (MOST_PASSES - 1)]
    assert all(sum(sample.length for sample in each) <= PASS_TOKENS for each in cut[1:])
    assert cut[1][0] is samples[0]


@pytest.mark.parametrize(
    ("settings", "where", "sentence"),
    [
        ({"eva_config": {}}, "eva_config", "is for init_lora_weights eva."),
        ({**EVA, "eva_config": {"tau": 1.5}}, "eva_config.tau", "must be at most 1, got 1.5."),
        ({**EVA, "eva_config": {"rho": 2.0}}, "eva_config.rho", "eva moves no ranks from module to module; r and "
         "rank_pattern set them."),
        ({**EVA, "new_tokens": ("<a>",)}, "init_lora_weights", "eva looks at the data by the bare backbone, which has "
         "no rows for new tokens; keep one of the two."),
    ],
)  # fmt: skip
def test_spec_when_eva_does_not_go_with_it_then_refused_with_the_reason(settings: dict[str, Any], where, sentence):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**settings)
    assert (caught.value.where, caught.value.message) == (where, sentence)


def test_spec_when_peft_would_move_no_rank_then_its_words_are_accepted():
    spec = AdapterSpec(**EVA, eva_config={"rho": 1.0, "tau": 0.9, "whiten": False, "label_mask_value": -100})
    assert spec.eva == EvaSpec(tau=0.9)


def test_job_when_shared_layers_or_another_adapter_are_requested_then_is_refused():
    with pytest.raises(ConfigError, match="eva looks at whole inputs, of which devices that share layers have parts"):
        refuse_indivisible(me()[0])
    with pytest.raises(ConfigError, match="init_adapter: continues an adapter, which then cannot start by eva"):
        JobSpec("a", ("rows",), adapter=AdapterSpec(**EVA), init_adapter="before")
