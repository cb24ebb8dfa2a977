"""Eight jobs of batch size 1 with short samples on a CPU: together, one by one, and one by one with HF PEFT.

    python -m benchmarks cpu-together [--json FILE]

All three train the same adapters (r=8, all linears) on the embedded backbone with the same samples. PEFT runs plain
transformers on unpadded batches of one sample, with torch's AdamW. The three take turns; each figure is the median over
the turns, of trained tokens per second after warm-up and of the ratio within a turn. Loading, evaluation and
checkpoints are not in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.figures import Kind, Targets
from benchmarks.report import JsonFile, run_parts
from benchmarks.steps.peers import need_peft
from weft.cli.demo import SKILLS, write_skill
from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.model.load import load_backbone, load_plain_model
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

WARM_UP, STEPS, REPEATS = 4, 24, 5


def make_jobs(folder: Path) -> list[JobSpec]:
    """Eight skills, batch size 1."""
    jobs = []
    for name in list(SKILLS)[:8]:
        (folder / name).mkdir()
        write_skill(folder / name, name, train=64, held=1)
        jobs.append(
            JobSpec(
                name=name,
                train_data=(str(folder / name / "train.jsonl"),),
                adapter=AdapterSpec(r=8, lora_alpha=16),
                global_batch_size=1,
                max_steps=WARM_UP + STEPS,
                max_length=128,
                learning_rate=1e-3,
            )
        )
    return jobs


def weft_rate(backbone: Any, jobs: list[tuple[JobSpec, JobData]]) -> tuple[int, float]:
    """(tokens, seconds) of training these jobs together, after each has warmed up."""
    engine = Engine(backbone, capacity=1024)
    for spec, data in jobs:
        engine.submit(spec, data)
    start, tokens, warm = 0.0, 0, 0
    for event in engine.events():
        if event.kind != "step":
            continue
        fields = event.fields()
        if warm < len(jobs) * WARM_UP:
            warm += 1
            start = time.perf_counter()
        else:
            tokens += fields["tokens"]
    return tokens, time.perf_counter() - start


def peft_rate(jobs: list[tuple[JobSpec, JobData]]) -> tuple[int, float]:
    """(tokens, seconds) of training the jobs one after another with PEFT."""
    from peft import LoraConfig, get_peft_model

    tokens, seconds = 0, 0.0
    for _, data in jobs:
        torch.manual_seed(0)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(load_plain_model(BackboneSpec("tiny", device="cpu")), config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        start = 0.0
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                start = time.perf_counter()
            sample = data.train.samples[step % len(data.train.samples)]
            ids = torch.from_numpy(sample.tokens.astype("int64"))[None]
            labels = torch.where(torch.from_numpy(sample.supervised.copy())[None], ids, -100)
            model(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens += sample.length if step >= WARM_UP else 0
        seconds += time.perf_counter() - start
    return tokens, seconds


def measure_together() -> dict[str, float]:
    """Medians over the turns: tokens a second of each way, and together over each of the others."""
    need_peft()
    backbone = load_backbone(BackboneSpec("tiny", device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(j, load_job_data(j, backbone.tokenizer, Path())) for j in make_jobs(Path(folder))]
    turns = []
    for _ in range(REPEATS):
        alone = [weft_rate(backbone, [job]) for job in jobs]
        together, by_one, peft = weft_rate(backbone, jobs), tuple(map(sum, zip(*alone, strict=True))), peft_rate(jobs)
        turns.append([tokens / seconds for tokens, seconds in (together, by_one, peft)])
    medians = [statistics.median(rates) for rates in zip(*turns, strict=True)]
    over_alone, over_peft = (statistics.median(turn[0] / turn[i] for turn in turns) for i in (1, 2))
    return {
        **dict(zip(("together_tokens_per_s", "alone_tokens_per_s", "peft_tokens_per_s"), medians, strict=True)),
        "together_over_alone": over_alone,
        "together_over_peft": over_peft,
    }


TARGETS: Targets = {
    "together_tokens_per_s": (Kind.TOKENS_PER_S, None),
    "together_over_alone": (Kind.SPEEDUP, None),
    "together_over_peft": (Kind.SPEEDUP, None),
}


def cpu_together(json: JsonFile = None) -> None:
    """Eight jobs on a CPU: together, one by one, and one by one with PEFT."""
    raise typer.Exit(run_parts({"eight jobs of batch size 1": measure_together}, TARGETS, json))
