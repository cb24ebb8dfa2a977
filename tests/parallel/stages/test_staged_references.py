"""Jobs that compare with a reference or learn from a teacher have the bits of one device, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from covering import slow
from staged_models import staged_executor, train_until
from tensor_models import tensor_executor
from test_sharded import sharded
from test_spread import engine_of
from test_tensor import MODEL, assert_near
from tiny_models import (
    Job,
    Outcome,
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    small_job,
    submit,
    train,
)

from weft.data.dataset import Dataset, JobData
from weft.data.samples import Samples
from weft.engine.engine import Engine
from weft.engine.events import MicrobatchDone
from weft.errors import ConfigError, WeftError
from weft.objectives.distillation import Distillation
from weft.objectives.preference import Dpo, Kto
from weft.parallel.stages.stage_runner import ReferenceStageRunner
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.program import Forward, Program, Receive
from weft.plan.types import JobQueue, Limits
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

LAYERS = 3
STEP: dict[str, Any] = {"max_steps": 2, "global_batch_size": 3, "max_grad_norm": 0.2}
EVAL: dict[str, Any] = {"eval_data": 2, "eval_steps": 1}
TEACHER_LOGPROBS = [-0.2, -2.0, -3.5]
"""Log-probabilities of a teacher's most likely tokens."""
MIDDLE = {"r": 3, "layers_to_transform": (1,)}
"""An adapter that some stages have nothing of."""


def stored(folder: Path, spec: AdapterSpec | None = None, **options: Any) -> str:
    """An adapter directory."""
    spec = spec or AdapterSpec(r=3, lora_alpha=60, target_modules=("q_proj", "down_proj"), init_lora_weights=False)
    backbone = random_backbone("llama", num_hidden_layers=LAYERS, **options)
    adapter = backbone.new_adapter(spec, seed=9)
    write_adapter(
        folder,
        spec,
        adapter.tensors(),
        base_model="llama",
        target_names=list(adapter.modules),
        shared=adapter.shared,
        row_modules=backbone.embeddings.paths,
    )
    return str(folder)


def comparing(
    name: str, objective: Any, seed: int = 0, num_eval: int = 0, num_samples: int = 8, **settings: Any
) -> Job:
    """A job on random samples; a student without a teacher has a teacher's output in its data."""
    data = random_data(seed, num_samples=num_samples, num_eval=num_eval, lengths=(3, 12))

    def with_objective(part: Dataset) -> Dataset:
        samples = list(part.samples)
        if isinstance(objective, Kto):
            samples = [sample.labelled(index % 3 == 0) for index, sample in enumerate(samples)]
        elif isinstance(objective, Distillation) and "teacher" not in settings:
            samples = [
                sample.with_teacher([[4, 2, 9]] * (n := sample.num_supervised), [TEACHER_LOGPROBS] * n)
                for sample in samples
            ]
        return replace(part, objective=objective, samples=Samples.of(samples))

    held = None if data.eval is None else with_objective(data.eval)
    named = {"objective": objective.name} if {"reference", "teacher"} & settings.keys() else {}
    return job_spec(name, seed=seed, **{**STEP, **named, **settings}), JobData(with_objective(data.train), held)


def all_jobs(folder: Path, **settings: Any) -> list[Job]:
    """Preferences and students, beside the bare backbone and beside adapters; some of them are evaluated."""
    lora, soft, one = (str(folder / name) for name in ("lora", "soft", "one"))
    dropout = {"r": 4, "lora_dropout": 0.1}
    return [
        comparing("dpo", Dpo(0.3), num_eval=4, adapter=dropout, **EVAL, **settings),
        comparing("same", Dpo(0.5), num_eval=4, **settings),
        comparing("ipo", Dpo(0.5, "ipo"), 1, reference=lora, **settings),
        comparing("hinge", Dpo(0.3, "hinge"), 2, reference=soft, adapter=MIDDLE, **settings),
        comparing("smooth", Dpo(1.0, label_smoothing=0.1), 3, reference=one, **settings),
        comparing("kto", Kto(0.4, desirable_weight=1.5), 4, num_eval=3, **EVAL, **settings),
        comparing("student", Distillation(), 5, num_eval=3, teacher=lora, **EVAL, **settings),
        comparing("twin", Distillation(), 5, teacher=lora, learning_rate=1e-3, **settings),
        comparing("named", Distillation(top_k=7), 6, teacher=lora, **settings),
        comparing("told", Distillation(), 7, **settings),
        small_job("beside", 8, max_steps=2, **settings),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters: on all layers, in front of samples, and on one layer."""
    found = tmp_path_factory.mktemp("adapters")
    stored(found / "lora")
    stored(found / "soft", AdapterSpec(method="prompt_tuning", num_virtual_tokens=3))
    one = {"target_modules": ("q_proj",), "layers_to_transform": (2,), "init_lora_weights": False}
    stored(found / "one", AdapterSpec(r=2, lora_alpha=40, **one))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Outcome]:
    """What one device makes of them."""
    return train(random_backbone("llama", num_hidden_layers=LAYERS), all_jobs(folder), capacity=48)


def staged(schedule: Schedule, *sizes: int, **options: Any) -> Engine:
    planner = PipelinePlanner(schedule, len(sizes))
    return Engine(staged_executor("llama", sizes, **options), capacity=48, planner=planner)


def check(engine: Engine, jobs: list[Job], expected: dict[str, Outcome]) -> None:
    submit(engine, *jobs)
    outcomes = finish(engine)
    assert outcomes.keys() == {spec.name for spec, _ in jobs}
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("sizes", [(1, 2), slow((1, 1, 1))])
def test_jobs_when_stages_run_their_references_then_have_the_bits_of_one_device(folder, expected, sizes):
    """In programs that go on."""
    check(staged(Schedule.EAGER, *sizes), all_jobs(folder), expected)


def test_jobs_when_a_stage_receives_early_then_have_the_bits_of_one_device(folder, expected):
    """What is about to be read for one microbatch is not read again for the next."""

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        made = PipelinePlanner(Schedule.GPIPE, 2)(queues, limits)
        own = list(made.stages[1])
        for index in range(len(own) - 1):
            if isinstance(own[index], Forward) and isinstance(own[index + 1], Receive):
                own[index : index + 2] = own[index + 1], own[index]
        return replace(made, stages=(made.stages[0], tuple(own)))

    few = [job for job in all_jobs(folder) if job[0].name in ("same", "named", "kto")]
    check(Engine(staged_executor("llama", (2, 1)), capacity=48, planner=plan), few, expected)


def test_jobs_when_stages_take_the_fused_kernels_then_have_the_bits_of_one_device(folder):
    own = [job for job in all_jobs(folder) if job[0].name in ("dpo", "ipo", "student")]
    whole = random_backbone("llama", num_hidden_layers=LAYERS, kernels="fused")
    check(staged(Schedule.ONE_F_ONE_B, 1, 2, kernels="fused"), own, train(whole, own, capacity=48))


def test_jobs_when_spread_over_unlike_replicas_then_have_the_bits_of_one_device(folder, expected):
    """However their samples are dealt out, each replica reads the references that it needs."""
    free = [job for job in all_jobs(folder, gradient_sum="any_order") if job[0].name in ("dpo", "student")]
    other = [job for job in all_jobs(folder) if job[0].name in ("ipo", "kto")]
    whole = random_backbone("llama", num_hidden_layers=LAYERS)
    check(engine_of((3,), (1, 2), seed=2), free + other, expected | train(whole, free, capacity=48))


def test_jobs_when_shards_run_references_then_have_the_bits_of_one_device(folder, expected):
    engine, _ = sharded(2)
    check(engine, all_jobs(folder), expected)


def test_jobs_when_layers_are_shared_then_end_near_those_of_one_device(tmp_path):
    teacher = stored(tmp_path / "teacher", **MODEL)
    own = [
        comparing("dpo", Dpo(0.3), num_eval=4, reference=teacher, adam_epsilon=1e-3, **EVAL),
        comparing("student", Distillation(), 5, teacher=teacher, adam_epsilon=1e-3),
    ]
    outcomes = train(random_backbone("llama", num_hidden_layers=LAYERS, **MODEL), own, capacity=48)
    executor = tensor_executor("llama", 2, (1, 2), **MODEL)
    engine = Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_near(outcome, outcomes[name])
    engine.close()


def test_run_when_resumed_under_other_layouts_then_the_files_are_those_of_one_device(folder, tmp_path):
    own = [(replace(spec, max_steps=6), data) for spec, data in all_jobs(folder) if spec.name in ("ipo", "named")]

    def whole() -> Engine:
        return Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48)

    train_until(whole(), tmp_path / "one", 6, own)
    engines = (staged(Schedule.EAGER, 1, 2), whole(), engine_of((1, 2), (3,)))
    for index, engine in enumerate(engines):
        train_until(engine, tmp_path / "moved", 2 * index + 2, own)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert len(files) >= 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


def reference_rows(engine: Engine, *jobs: Job) -> list[int]:
    """Rows of references in front of each microbatch."""
    found: list[int] = []
    submit(engine, *jobs)
    finish(
        engine, lambda _, event: found.append(event.num_reference_rows) if isinstance(event, MicrobatchDone) else None
    )
    return found


def test_samples_when_they_have_been_read_then_are_not_read_again():
    """Neither in the second epoch nor for another job that compares the same; all of it is in the timeline."""
    one, other = (comparing(name, Dpo(beta), max_steps=5) for name, beta in (("one", 0.3), ("other", 0.5)))
    engine = staged(Schedule.EAGER, 1, 2)
    alone = reference_rows(engine, one)
    assert alone[0] and not any(alone[len(alone) // 2 :])
    spans = [span for span in engine.timeline.measured().spans if span.name == "reference"]
    assert sum(span.args["rows"] for span in spans) == 2 * sum(alone), "on both stages"
    assert sum(reference_rows(staged(Schedule.EAGER, 1, 2), one, other)) == sum(alone)


def test_job_when_others_that_share_its_references_leave_then_stages_agree_on_what_is_known():
    """They leave while stages have come to different microbatches; what only they have requested is requested again."""
    settings = {"num_samples": 24, "global_batch_size": 1, "save_steps": 1}
    own = [comparing("stays", Dpo(0.3), max_steps=12, **settings)]
    for seed in range(1, 5):
        spec, data = comparing(f"leaves{seed}", Dpo(0.5), max_steps=1 + seed, **settings)
        own.append((replace(spec, seed=seed), data))
    outcomes = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=24)
    engine = Engine(staged_executor("llama", (1, 1, 1)), capacity=24, planner=PipelinePlanner(Schedule.EAGER, 3))
    check(engine, own, outcomes)


def test_executor_when_a_pass_has_failed_then_the_next_run_repeats_it(monkeypatch):
    """Stages may have come to different microbatches by then."""
    own = [comparing("dpo", Dpo(0.3), num_eval=4, **EVAL)]
    outcomes = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    executor = staged_executor("llama", (1, 2))
    read, count = ReferenceStageRunner.read, 0

    def failing(runner: ReferenceStageRunner, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("out of luck")
        return read(runner, *given)

    monkeypatch.setattr(ReferenceStageRunner, "read", failing)
    engine = Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    submit(engine, *own)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.run()
    executor.unseat("dpo")
    executor.drop("dpo")
    check(Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2)), own, outcomes)


def test_memory_when_stages_run_references_then_what_they_hold_is_counted(folder):
    """Results lie on the last stage, while all else is taken to lie evenly."""
    found = []
    for engine in (Engine(random_backbone("llama", num_hidden_layers=LAYERS)), staged(Schedule.EAGER, 1, 2)):
        submit(engine, *all_jobs(folder)[1:3])
        same, ipo = (engine.jobs[name] for name in ("same", "ipo"))
        found.append((engine._placement.bytes_of(same), same.reference_bytes, ipo.num_reference_parameters))
    one, several = found
    assert several[0] - one[0] == one[1] > 0 and several[2] == one[2] > 0


WIDE = ("layers.0.self_attn.q_proj", "layers.2.mlp.down_proj")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            AdapterSpec(r=2, trainable_token_indices=(3,), layers_to_transform=(2,)),
            "its rows of tokens are on a stage where it has no module",
        ),
        (
            AdapterSpec(method="vera", target_modules=WIDE),
            "objective: the modules of the adapter that it compares",
        ),
        (None, "is for a module of"),
    ],
    ids=["rows of tokens", "as wide as the widest", "another model"],
)
def test_reference_when_stages_cannot_hold_it_then_refused_and_forgotten(tmp_path, spec, message):
    engine = staged(Schedule.ONE_F_ONE_B, 1, 2)
    path = stored(tmp_path / "old", spec, **({} if spec else {"hidden_size": 64}))
    with pytest.raises(WeftError, match=message):
        submit(engine, comparing("job", Dpo(0.3), reference=path))
    submit(engine, comparing("job", Dpo(0.3), max_steps=1))
    assert finish(engine)["job"].state == "succeeded"


def test_reference_when_its_method_is_not_for_the_layout_then_refused(tmp_path):
    pruned = AdapterSpec(method="diff_pruning", density=0.05)
    job = comparing("job", Dpo(0.3), reference=stored(tmp_path / "pruned", pruned, **MODEL))
    executor = tensor_executor("llama", 2, (3,), **MODEL)
    with pytest.raises(ConfigError, match="reference: diff_pruning chooses among the numbers of whole weights"):
        submit(Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 1)), job)
    executor.close()
