"""Jobs that learn from teachers equal the same jobs trained alone by PEFT, with the loss written out on its logits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from covering import each_value
from test_exact import BOUND, STEPS, largest_difference, train_with_peft
from tiny_models import (
    Job,
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    small_job,
    train,
)

from weft.data.dataset import JobData
from weft.data.load import of_job
from weft.data.samples import Samples
from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved, MicrobatchDone
from weft.engine.execute.teacher_file import teacher_rows
from weft.engine.jobs.live_job import LiveJob
from weft.errors import ConfigError, DataError
from weft.objectives.distillation import IDS, LOGPROBS, Distillation
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter
from weft.store.run_dir import RunDirectory, RunRecord

STORED = AdapterSpec(r=3, lora_alpha=60, target_modules=("q_proj", "down_proj"), init_lora_weights=False)
LEARNT: dict[str, dict[str, Any]] = {
    "base": {"teacher": "base", "distillation_alpha": 0.9, "adapter": {"r": 4, "init_lora_weights": False}},
    "adapter": {"distillation_temperature": 2.0},
    "reverse": {"distillation_alpha": 1.0, "distillation_divergence": "reverse_kl"},
    "jsd": {"distillation_divergence": "jsd", "distillation_temperature": 0.8},
    "named": {"distillation_top_k": 7, "distillation_alpha": 0.7, "distillation_temperature": 1.5},
}


def teacher_dir(folder: Any, family: str = "llama_odd") -> str:
    """A teacher that is far enough from the bare backbone to differ visibly."""
    tensors = random_backbone(family).new_adapter(STORED, seed=9).tensors()
    write_adapter(folder, STORED, tensors, base_model=family, target_names=["down_proj", "q_proj"])
    return str(folder)


def student(name: str, seed: int = 0, num_eval: int = 0, **settings: Any) -> Job:
    """A job on random answers; an epsilon above the rounding takes chance out of Adam, as in test_exact."""
    fixed = {"max_steps": STEPS, "seed": seed, "adam_epsilon": 1e-3, "global_batch_size": 3, "adapter": {"r": 4}}
    spec = job_spec(name, objective="distillation", **{**fixed, **settings})
    data = random_data(seed, num_samples=8, num_eval=num_eval)
    parts = [part and replace(part, objective=Distillation()) for part in (data.train, data.eval)]
    return spec, of_job(JobData(*parts), spec)


def teacher_logits(model: Any, teacher: str, **inputs: Any) -> torch.Tensor:
    """Logits of PEFT's own teacher."""
    with torch.no_grad():
        if teacher == "base":
            with model.disable_adapter():
                return model(**inputs).logits
        return peft_teacher(teacher)(**inputs).logits


@cache
def peft_teacher(teacher: str) -> Any:
    """Made once: it never changes."""
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    return peft.PeftModel.from_pretrained(plain, teacher)


def peft_loss(model: Any, job: LiveJob, step: int) -> tuple[torch.Tensor, float]:
    """The mean loss of the supervised tokens of a global batch, sample by sample."""
    objective, total, count = job.data.train.distillation, torch.zeros(()), 0
    assert objective is not None and job.spec.teacher is not None
    for i in job.progress.order.batch(step):
        sample = job.data.train.samples[i]
        ids = torch.from_numpy(sample.tokens.astype("int64"))
        rows = torch.from_numpy(sample.supervised[1:].copy())
        logits = model(input_ids=ids[None]).logits[0, :-1][rows]
        taught_NV = teacher_logits(model, job.spec.teacher, input_ids=ids[None])[0, :-1][rows]
        if objective.top_k is not None:
            taught_NV = taught_NV.masked_fill(taught_NV < taught_NV.topk(objective.top_k, dim=1).values[:, -1:], -1e9)
        s, p = ((x / objective.temperature).log_softmax(dim=1) for x in (logits, taught_NV))
        if objective.divergence == "jsd":
            middle = ((s.exp() + p.exp()) / 2).log()
            apart = (p.exp() * (p - middle) + s.exp() * (s - middle)) / 2
        else:
            apart = p.exp() * (p - s) if objective.divergence == "forward_kl" else s.exp() * (s - p)
        total = total + objective.alpha * objective.temperature**2 * apart.sum()
        total = total + (1 - objective.alpha) * F.cross_entropy(logits, ids[1:][rows], reduction="sum")
        count += len(logits)
    return total / count, 0.0


def test_students_when_trained_together_then_each_equals_peft_alone(tmp_path):
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    teacher = teacher_dir(tmp_path / "teacher")
    engine = Engine(random_backbone("llama_odd"), capacity=120)
    for seed, (name, settings) in enumerate(LEARNT.items()):
        engine.submit(*student(name, seed, **{"teacher": teacher, **settings}))
    starts = {job: engine.executor.adapter_of(job) for job in engine.jobs}
    outcomes = finish(engine)
    for job, live in engine.jobs.items():
        expected, losses, _ = train_with_peft(plain, live, starts[job], peft_loss)
        assert outcomes[job].losses == pytest.approx(losses, rel=BOUND, abs=BOUND), job
        assert largest_difference(outcomes[job].adapter, expected) <= BOUND, job
        assert largest_difference(outcomes[job].adapter, starts[job]) > 0.01, "the job learned nothing"


@pytest.mark.parametrize(("kernels", "top_k"), each_value(["reference", "fused"], [None, 5]))
def test_student_when_trained_beside_others_then_has_the_bits_of_being_alone(tmp_path, kernels, top_k):
    settings = {"distillation_top_k": top_k}
    teacher, backbone = teacher_dir(tmp_path / "t", "llama"), random_backbone("llama", kernels=kernels)
    jobs = [student(name, i, 2, teacher=teacher, max_steps=6, **settings) for i, name in enumerate(("mine", "other"))]
    bare = student("bare", 2, teacher="base", max_steps=6, **settings)
    alone = train(backbone, jobs[:1])["mine"]
    together = train(backbone, [small_job("n0"), *jobs, bare], capacity=90)
    assert_same_bits(alone, together["mine"])
    assert_same_bits(train(backbone, [small_job("n0")])["n0"], together["n0"])
    assert alone.losses[-1] < alone.losses[0] and alone.eval_losses


def test_teacher_when_its_likely_tokens_are_kept_then_it_speaks_of_each_sample_once():
    """And in every epoch where all of its tokens are wanted."""

    def extra_rows(**settings: Any) -> list[int]:
        found = []
        engine = Engine(random_backbone("llama"), capacity=200)
        engine.submit(*student("mine", 0, teacher="base", max_steps=9, **settings))

        def note(_: Engine, event: Any) -> None:
            if isinstance(event, MicrobatchDone):
                found.append(event.num_reference_rows)

        finish(engine, note)
        return found

    assert sum(extra_rows(distillation_top_k=3)[3:]) == 0 < sum(extra_rows(distillation_top_k=3))
    assert all(extra_rows())


def stored_student(name: str, backbone: Any, top_k: int, **settings: Any) -> Job:
    """A student whose data holds the bare backbone's log-probabilities."""
    spec, data = student(name, 0, **settings)

    def with_teacher_rows(part: Any) -> Any:
        rows = teacher_rows(backbone, None, part, top_k, 64)
        taught = [s.with_teacher(r[IDS], r[LOGPROBS]) for s, r in zip(part.samples, rows, strict=True)]
        return replace(part, samples=Samples.of(taught))

    return spec, JobData(with_teacher_rows(data.train), None)


def test_student_when_its_data_holds_a_teachers_output_then_learns_as_from_the_teacher_itself(caplog):
    backbone = random_backbone("llama")
    live = train(backbone, [student("mine", 0, teacher="base", max_steps=6, distillation_top_k=5)])["mine"]
    stored = stored_student("mine", backbone, 8, max_steps=6, distillation_top_k=5)
    found = train(backbone, [stored])["mine"]
    assert found.losses == pytest.approx(live.losses, rel=1e-4)
    assert_same_bits(found, train(backbone, [small_job("n0"), stored], capacity=90)["mine"])
    stored = stored_student("mine", backbone, 8, max_steps=6)
    every = train(backbone, [stored])["mine"]
    assert every.losses != found.losses
    beside = student("live", 0, teacher="base", max_steps=6)
    assert_same_bits(every, train(backbone, [beside, stored], capacity=200)["mine"])
    assert not caplog.records, "they share microbatches, though one teacher gives more tokens than the other"


def test_student_when_it_has_no_teacher_or_two_then_is_refused():
    backbone = random_backbone("llama")
    engine = Engine(backbone, capacity=64)
    with pytest.raises(ConfigError, match=r"^teacher: is missing; name an adapter directory, or base for the bare"):
        engine.submit(*student("mine"))
    with pytest.raises(ConfigError, match=r"^teacher: the rows hold a teacher's outputs .*; leave it out\.$"):
        engine.submit(*stored_student("mine", backbone, 3, teacher="base"))
    with pytest.raises(ConfigError, match=r"^distillation_divergence: reverse_kl needs all tokens of the teacher"):
        engine.submit(*stored_student("mine", backbone, 3, distillation_divergence="reverse_kl"))
    spec, data = stored_student("mine", backbone, 3)
    wrong = [s.with_teacher(s.teacher.ids + 1000, s.teacher.logprobs) for s in data.train.samples]
    with pytest.raises(DataError, match="a sample has a token outside 0 to"):
        engine.submit(spec, JobData(replace(data.train, samples=Samples.of(wrong)), None))
    assert not engine.jobs


def test_neighbour_when_a_teacher_is_not_finite_then_keeps_its_bits(tmp_path, monkeypatch):
    from weft.adapters.adapter import Adapter

    backbone = random_backbone("llama")
    alone = train(backbone, [small_job("n0")])["n0"]
    loaded = Adapter.load

    def poisoned(adapter: Any, tensors: Any, where: str) -> None:
        loaded(adapter, tensors, where)
        adapter.groups["b"].params.fill_(float("nan"))

    monkeypatch.setattr(Adapter, "load", poisoned)
    job = student("mine", 0, teacher=teacher_dir(tmp_path / "t", "llama"), max_steps=6)
    together = train(backbone, [small_job("n0"), job])
    assert together["mine"].state == "failed"
    assert_same_bits(alone, together["n0"])


def test_student_when_its_run_is_cut_off_and_resumed_then_ends_with_the_same_bits(tmp_path):
    """The teacher reads those samples again."""
    teacher = teacher_dir(tmp_path / "t", "llama")
    job = student("mine", 0, teacher=teacher, max_steps=8, save_steps=3, distillation_top_k=4)
    whole = train(random_backbone("llama"), [job])["mine"]
    for resume in (False, True):
        engine = Engine(random_backbone("llama"), capacity=64)
        with RunDirectory.open(tmp_path / "run", resume=resume) as directory:
            if not resume:
                directory.write_run(RunRecord())
            engine.keep_in(directory)
            engine.submit(*job)
            if resume:
                outcome = finish(engine)["mine"]
                break
            next(event for event in engine.events() if isinstance(event, CheckpointSaved))
    assert len(outcome.losses) == 5 and outcome.losses == whole.losses[3:]
    assert all(
        x.equal(y) for path in whole.adapter for x, y in zip(whole.adapter[path], outcome.adapter[path], strict=True)
    )
