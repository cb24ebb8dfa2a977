"""Tiny random backbones cut into stages, and jobs of all kinds for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny_models import Job, job_spec, random_data, random_model, submit

from benchmarks.pipeline.in_process import LocalStages
from weft.data.dataset import JobData
from weft.data.load import Prompt
from weft.data.samples import Samples
from weft.engine.engine import Engine
from weft.model.backbone import Backbone
from weft.model.model_part import ModelPart, keep_part
from weft.model.path import Memory
from weft.objectives.heads import Classification
from weft.objectives.preference import SimPo
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.program import Program
from weft.spec.sampling import Decoding
from weft.store.run_dir import RunDirectory, RunRecord


def staged_executor(
    name: str, *replicas: tuple[int, ...], kernels: str = "reference", memory: Memory | None = None, **options: Any
) -> StagedExecutor:
    """Tiny random replicas in this process, each cut into stages of so many layers."""
    parts = [part_backbones(name, sizes, kernels, memory, **options) for sizes in replicas]
    tokenizer: Any = parts[0][0].tokenizer
    return StagedExecutor(LocalStages(*parts), tokenizer)


def part_backbones(
    name: str, sizes: tuple[int, ...], kernels: str = "reference", memory: Memory | None = None, **options: Any
) -> list[Backbone]:
    """One replica, cut into stages of so many layers."""
    parts, first = list[Backbone](), 0
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    for size in sizes:
        part = ModelPart(first, first + size, sum(sizes))
        model = random_model(name, num_hidden_layers=part.num_layers, **options)
        keep_part(model, part)
        parts.append(Backbone(model, tokenizer, name, part))
        parts[-1].use_kernels(kernels, memory)
        first += size
    return parts


def odd_jobs() -> list[Job]:
    """Buffers whose cuts are no multiple of anything, and all that an adapter or an optimizer can remember."""
    step = {"max_steps": 4, "max_grad_norm": 0.3, "weight_decay": 0.1}
    adapters: dict[str, dict[str, Any]] = {
        "dora": {"method": "dora", "r": 3},
        "vera": {"method": "vera"},
        "bottleneck": {"method": "bottleneck", "bottleneck_size": 5},
        "diff": {"method": "diff_pruning", "density": 0.05, "mask": "l0"},
        "prompt": {"method": "prompt_tuning", "num_virtual_tokens": 3},
        "prefix": {"method": "prefix_tuning", "num_virtual_tokens": 3},
        "one_layer": {"r": 3, "layers_to_transform": (1,)},
    }
    settings: dict[str, dict[str, Any]] = {
        "muon": {"optim": "muon"},
        "adafactor": {"optim": "adafactor"},
        "lion": {"optim": "lion"},
        "average": {"ema_decay": 0.9, "learning_rate_pattern": {"layers.2.mlp.up_proj": 2.0}},
    }
    found = [job_spec(name, adapter=adapter, **step) for name, adapter in adapters.items()]
    found += [job_spec(name, adapter={"r": 3}, **step, **own) for name, own in settings.items()]
    return [(spec, random_data(seed, num_samples=5)) for seed, spec in enumerate(found)]


def objective_jobs() -> list[Job]:
    """A head for labels, and pairs whose samples share a microbatch."""
    labelled, paired = random_data(1, num_samples=6), random_data(2, num_samples=6)
    texts = Samples.of([sample.labelled_end(n % 3) for n, sample in enumerate(labelled.train.samples)])
    head = replace(labelled.train, objective=Classification(("a", "b", "c")), samples=texts)
    pairs = replace(paired.train, objective=SimPo(2.0, gamma=0.3))
    step = {"max_steps": 3, "global_batch_size": 3, "max_grad_norm": 0.2}
    return [
        (job_spec("labels", adapter={"r": 3}, **step), JobData(head, None)),
        (job_spec("pairs", adapter={"r": 3}, **step), JobData(pairs, None)),
    ]


def train_until(engine: Engine, folder: Path, step: int, jobs: list[Job]) -> None:
    """Trains until all jobs have done so many steps, and saves them there."""
    submit(engine, *jobs)
    is_new = not folder.exists()
    with RunDirectory.open(folder, resume=not is_new) as directory:
        if is_new:
            directory.write_run(RunRecord(base_model="tiny", capacity=48))
        engine.keep_in(directory)
        for name in engine.jobs:
            engine.hold(name, step)
        engine.run()
        engine.stop()
        engine.run()


def prompts(number: int = 6) -> list[Prompt]:
    """Of unlike lengths."""
    tokens = [[5, 9, 14], [33], [7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 41], [3], [60, 22, 9, 1]]
    return [Prompt(np.array(ids, dtype=np.int32), "", None, f"prompt {ids}") for ids in tokens[:number]]


def assert_same_answers(mine: Engine, other: Engine, jobs: Sequence[str]) -> None:
    """Both write the same to the same prompts."""
    decoding = Decoding(max_new_tokens=7, temperature=0.7, top_p=0.9, seed=3)
    for name in jobs:
        texts = [[answer.text for answer in engine.answer(name, prompts(), decoding)] for engine in (mine, other)]
        assert texts[0] == texts[1] and any(texts[0]), name


def shuffled(program: Program, rng: random.Random) -> Program:
    """The program with some neighbouring instructions of its stages in another order."""
    stages = [list(own) for own in program.stages]
    for _ in range(rng.randint(1, 2)):
        own = rng.choice(stages)
        i = rng.randrange(len(own) - 1)
        own[i], own[i + 1] = own[i + 1], own[i]
    return replace(program, stages=tuple(map(tuple, stages)))
