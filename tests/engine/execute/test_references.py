"""References read each sample once; whether results are kept, shared or read again changes no bit of a job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import (
    assert_same_bits,
    dataset,
    finish,
    job_spec,
    random_data,
    random_sample,
    shallow_backbone,
    small_job,
    submit,
    train,
)

from weft.adapters.adapter import Adapter
from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved, JobFailed, MicrobatchDone, StepDone
from weft.engine.execute import microbatch
from weft.engine.execute.references import JobReference, ReferenceCache, RequestedRows, run_references
from weft.engine.inference.attach import read_stored
from weft.errors import AdapterFileError, ConfigError
from weft.model.backbone import Backbone
from weft.model.fused.graphs import InFlightBuffers
from weft.model.fused.inputs import InputShape
from weft.model.objective_loss import ReferenceRows
from weft.model.packed import SlotSample, pack_samples
from weft.objectives.distillation import Distillation
from weft.objectives.preference import Dpo
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter
from weft.store.run_dir import RunDirectory, RunRecord

TILE = 128
STORED = AdapterSpec(r=3, lora_alpha=5, target_modules=("q_proj", "down_proj"), init_lora_weights=False)


def stored(folder, seed: int = 9, spec: AdapterSpec = STORED, backbone: Backbone | None = None):
    """An adapter directory for the tiny Llama."""
    tensors = (backbone or shallow_backbone()).new_adapter(spec, seed=seed).tensors()
    names = list(spec.target_modules)
    write_adapter(folder, spec, tensors, base_model="llama", target_names=names)
    return folder


def pair_job(name: str = "pairs", seed: int = 0, num_samples: int = 12, of_data: int = 5, **settings):
    """Six pairs to train on in two steps an epoch, unless there are more, and two to evaluate on."""
    data = random_data(of_data, num_samples=num_samples, num_eval=4, lengths=(3, 9))
    assert data.eval is not None
    settings = {"global_batch_size": 3, "max_steps": 6, "eval_steps": 2, "seed": seed} | settings
    return job_spec(name, **settings), JobData(*(replace(d, objective=Dpo(0.3)) for d in (data.train, data.eval)))


def extra_rows(*jobs, capacity: int = 64) -> list[int]:
    """What references ran in front of each microbatch, in tiles of rows."""
    engine, found = Engine(shallow_backbone("llama"), capacity=capacity), []
    submit(engine, *jobs)

    def note(_, event):
        if isinstance(event, MicrobatchDone):
            found.append(event.num_reference_rows // TILE)

    finish(engine, note)
    return found


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_rows_when_read_alone_or_among_others_then_the_same_bits(kernels, tmp_path):
    """Which is why one job's rows can be shared with all others."""
    backbone = shallow_backbone("llama", kernels=kernels)
    adapter = read_stored(stored(tmp_path / "old", backbone=backbone))
    rng = np.random.default_rng(3)
    samples = [random_sample(rng, length) for length in (19, 30, 12, 25, 17, 8)]
    for given in (None, adapter):
        found = []
        for order, limit in ((range(6), 20), (range(5, -1, -1), 500)):
            reference = JobReference(ReferenceCache(backbone), dataset(samples), given)
            reference.take_slot()
            requested = {i: RequestedRows(reference, None, reference.rows(samples[i], None, TILE)) for i in order}
            assert run_references(backbone, list(requested.values()), TILE, limit) >= TILE
            assert run_references(backbone, list(requested.values()), TILE, limit) == 0
            found.append([requested[i].rows.logprobs_N for i in range(6)])
            reference.free_slot()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_epochs_when_the_first_is_over_then_no_reference_runs_again():
    """One pass has room for all six pairs; evaluations are passes of their own."""
    found = extra_rows(pair_job())
    assert found[0] == 1 and not any(found[1:]) and len(found) > 4


def test_pass_when_it_looks_ahead_then_no_sample_takes_room_twice(monkeypatch):
    """What the microbatch itself has to know is not among what its jobs will have to."""
    seen: list[list[ReferenceRows]] = []

    def recorded(backbone, requested, *rest):
        seen.append([each.rows for each in requested if not each.rows.is_known])
        return run_references(backbone, requested, *rest)

    monkeypatch.setattr(microbatch, "run_references", recorded)
    train(shallow_backbone("llama"), [pair_job()])
    assert len(seen[0]) == len(set(seen[0])) == 12, "all six pairs, of which three are ahead"


def test_pass_when_it_has_room_then_is_filled_with_what_neighbours_will_have_to_know():
    """Each of them alone would need a second pass of its own."""
    few, many = pair_job("few", num_samples=18, max_steps=3), pair_job("many", of_data=6, num_samples=24, max_steps=4)
    assert extra_rows(few, many, capacity=128) == [1, 1, 0, 0]


def test_reference_when_adapters_are_there_then_takes_their_kernels(monkeypatch):
    """Otherwise its result would depend on the captured graphs: products round differently without adapters."""
    backbone = shallow_backbone("llama", kernels="fused")
    shapes: list[InputShape] = []
    forward = InFlightBuffers.forward

    def noted(buffers, batch, shape, *rest, **options):
        shapes.append(shape)
        return forward(buffers, batch, shape, *rest, **options)

    monkeypatch.setattr(InFlightBuffers, "forward", noted)
    batch = pack_samples([SlotSample(random_sample(np.random.default_rng(1), 9))], TILE, backbone.device)
    backbone.path.read(batch, TILE)
    backbone.attach(backbone.new_adapter(AdapterSpec(r=2), 0))
    backbone.path.read(batch, TILE)
    assert [shape.is_adapted for shape in shapes] == [False, True]


def test_jobs_when_they_compare_the_same_samples_then_one_of_them_reads_the_reference():
    jobs = [pair_job(f"p{i}", seed=i, learning_rate=1e-3 * (i + 1)) for i in range(3)]
    assert sum(extra_rows(*jobs)) == sum(extra_rows(jobs[0])) == 1


def test_job_when_reference_rows_are_dropped_on_the_way_then_ends_with_the_same_bits():
    backbone, forgotten = shallow_backbone("llama"), []
    kept = train(backbone, [pair_job()])["pairs"]

    def forget(engine, event):
        if isinstance(event, StepDone) and event.job == "pairs":
            reference = engine.executor.jobs["pairs"].reference
            forgotten.append(len(reference._kept))
            reference.free_slot()

    again = train(backbone, [small_job("n0"), pair_job()], on_event=forget)["pairs"]
    assert_same_bits(kept, again)
    assert all(forgotten[:-1]), "there was something to forget"


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_job_when_it_compares_with_an_adapter_then_alone_and_together_have_the_same_bits(tmp_path, kernels):
    backbone = shallow_backbone("llama", kernels=kernels)
    path = str(stored(tmp_path / "old", backbone=backbone))
    job = pair_job("mine", reference=path, objective="dpo")
    alone = train(backbone, [job])["mine"]
    together = train(backbone, [small_job("n0"), job, pair_job("other")])
    assert_same_bits(alone, together["mine"])
    assert alone.losses[0] != pytest.approx(together["other"].losses[0], abs=1e-4)
    assert not {slot for linear in backbone.linears.values() for slot in linear.slots}


def test_job_when_it_starts_from_its_reference_then_its_first_loss_is_that_of_no_gain(tmp_path):
    """The reference runs without dropout, and so does a job that has none."""
    path = str(stored(tmp_path / "old"))
    shape = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    job = pair_job("next", init_adapter=path, reference=path, objective="dpo", adapter=shape)
    losses = train(shallow_backbone(), [job])["next"].losses
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[-1] < losses[0]


def test_reference_when_it_is_prompt_tuned_then_reads_samples_behind_its_virtual_tokens(tmp_path):
    backbone = shallow_backbone()
    spec = AdapterSpec(method="prompt_tuning", num_virtual_tokens=3)
    path = stored(tmp_path / "soft", spec=spec, backbone=backbone)
    job = pair_job("mine", reference=str(path), objective="dpo")
    assert_same_bits(train(backbone, [job])["mine"], train(backbone, [small_job("n0"), job])["mine"])


def test_reference_when_it_has_rows_of_the_head_of_its_own_then_speaks_by_these(tmp_path):
    backbone = shallow_backbone()
    spec = replace(STORED, trainable_token_indices=(3, 7, 11))
    adapter = backbone.new_adapter(spec, seed=9)
    for rows in adapter.token_rows.values():
        rows.rows_KD.add_(1.0)
    paths, names = backbone.embeddings.paths, ["q_proj", "down_proj"]
    write_adapter(tmp_path / "old", spec, adapter.tensors(), base_model="llama", target_names=names, row_modules=paths)
    job = pair_job("mine", reference=str(tmp_path / "old"), objective="dpo")
    plain = pair_job("mine", reference=str(stored(tmp_path / "plain")), objective="dpo")
    alone = train(backbone, [job])["mine"]
    assert_same_bits(alone, train(backbone, [small_job("n0"), job])["mine"])
    assert alone.losses[0] != pytest.approx(train(backbone, [plain])["mine"].losses[0], abs=1e-4)
    taught = JobData(replace(random_data(0).train, objective=Distillation()), None)
    student = job_spec("student", objective="distillation", teacher=str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"teacher: .* has rows of tokens of its own; a teacher predicts by the"):
        Engine(backbone, capacity=64).submit(student, taught)


def test_neighbour_when_a_reference_is_not_finite_then_keeps_its_bits(tmp_path, monkeypatch):
    backbone = shallow_backbone()
    job = pair_job("mine", reference=str(stored(tmp_path / "old")), objective="dpo")
    alone = train(backbone, [small_job("n0")])["n0"]
    loaded = Adapter.load

    def poisoned(adapter, tensors, where):
        loaded(adapter, tensors, where)
        adapter.groups["b"].params.fill_(float("nan"))

    monkeypatch.setattr(Adapter, "load", poisoned)
    together = train(backbone, [small_job("n0"), job])
    assert together["mine"].state == "failed"
    assert_same_bits(alone, together["n0"])


def test_reference_when_it_is_wrong_then_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"reference: is a setting of dpo and kto; the objective is simpo\."):
        job_spec("mine", reference="old", objective="simpo")
    engine = Engine(shallow_backbone(), capacity=64)
    with pytest.raises(AdapterFileError, match="gone: there is no such adapter directory"):
        engine.submit(*pair_job(reference="gone", objective="dpo"))
    path = stored(tmp_path / "wide", backbone=shallow_backbone("llama", hidden_size=64))
    with pytest.raises(AdapterFileError, match="is for a module of"):
        engine.submit(*pair_job(reference=str(path), objective="dpo"))
    assert not engine.jobs


def test_run_when_its_reference_has_changed_then_is_not_resumed(tmp_path):
    path = stored(tmp_path / "old")

    def go_on(number: int) -> str:
        engine = Engine(shallow_backbone(), capacity=64)
        with RunDirectory.open(tmp_path / "run", resume=number > 0) as directory:
            if not number:
                directory.write_run(RunRecord())
            engine.keep_in(directory)
            engine.submit(*pair_job(reference=str(path), objective="dpo", save_steps=2))
            for event in engine.events():
                if isinstance(event, CheckpointSaved) and event.step == 2 + 2 * number:
                    break
                if isinstance(event, JobFailed):
                    return event.reason.text
        return ""

    assert go_on(0) == go_on(1) == ""
    stored(path, seed=10)
    failed = go_on(2)
    assert failed.startswith(
        "pairs: the adapter that the job compares with is not the one its checkpoint was trained with"
    )


def test_memory_when_a_job_compares_then_what_it_keeps_is_counted(tmp_path):
    engine = Engine(shallow_backbone(), capacity=64)
    engine.submit(*pair_job("bare"))
    engine.submit(*pair_job("adapter", reference=str(stored(tmp_path / "old")), objective="dpo"))
    bare, adapter = (engine._placement.bytes_of(engine.jobs[name]) for name in ("bare", "adapter"))
    data = engine.jobs["bare"].data
    assert data.train.reference_bytes == 4 * data.train.summary.num_supervised_tokens > 0
    assert engine.jobs["adapter"].num_reference_parameters > 0
    assert adapter - bare == engine.jobs["adapter"].num_reference_parameters * engine.executor.facts.weight_bytes
