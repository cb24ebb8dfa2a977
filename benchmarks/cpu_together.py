"""Eight jobs of batch size 1 with short samples on a CPU: together, one by one, and one by one with HF PEFT.

    python -m benchmarks cpu-together [--json FILE]

All three train the same adapters (r=8, all linears) on the embedded backbone with the same samples. PEFT runs plain
transformers on unpadded batches of one sample, with torch's AdamW. The three take turns; each figure is the median over
the turns, of trained tokens per second after warm-up and of the ratio within a turn. Loading, evaluation and
checkpoints are not in it.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import JsonFile
from benchmarks.steps.peers import need_peft
from weft.cli.skills import SKILLS, write_skill
from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.model.load import load_backbone, load_plain_model
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.store.atomic import write_file
from weft.store.json_text import dump

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


def cpu_together(json: JsonFile = None) -> None:
    """Eight jobs on a CPU: together, one by one, and one by one with PEFT."""
    need_peft()
    backbone = load_backbone(BackboneSpec("tiny", device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(j, load_job_data(j, backbone.tokenizer, Path())) for j in make_jobs(Path(folder))]
    rates: dict[str, list[float]] = {"together": [], "one by one": [], "PEFT, one by one": []}
    for _ in range(REPEATS):
        tokens, seconds = weft_rate(backbone, jobs)
        rates["together"].append(tokens / seconds)
        alone = [weft_rate(backbone, [job]) for job in jobs]
        rates["one by one"].append(sum(t for t, _ in alone) / sum(s for _, s in alone))
        tokens, seconds = peft_rate(jobs)
        rates["PEFT, one by one"].append(tokens / seconds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    print(f"8 jobs of batch size 1, tiny backbone, {machine}")
    ratios = {
        name: statistics.median(t / v for t, v in zip(rates["together"], values, strict=True))
        for name, values in rates.items()
    }
    for name, rate in medians.items():
        print(f"  {name:<18} {rate:8,.0f} tokens/s   together is {ratios[name]:.1f}x")
    if json is not None:
        figures = {"machine": machine, "tokens_per_s": medians, "together_is": ratios}
        write_file(json, dump(figures))
