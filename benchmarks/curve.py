"""Loss curves on the embedded backbone: Weft beside PEFT step by step, FP8 beside unquantised, alone beside others.

    python -m benchmarks curve --steps 100 --json curve.json

| figure | what it compares |
|---|---|
| curve_vs_peft | loss of each step, all jobs together in Weft, each alone in PEFT: mean difference over the mean loss |
| curve_rounding | in bf16: that difference between Weft and PEFT in fp32 over the one between PEFT in bf16 and fp32 |
| curve_fp8_eval | eval loss after those steps with an FP8 backbone over that without, less one; all jobs summed |
| curve_bits | numbers of the final adapters that differ when a job trains alone |

Prompts count in the loss: they cannot be foretold, so it has a floor. Answers alone are learnt to 1e-4 in 100 steps,
and a per cent of that means nothing.

Two bf16 runs that round in different places drift apart however right both are, so in bf16 the second figure decides:
Weft is to stay as near to fp32 as PEFT does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer

from benchmarks.figures import Figure, Kind
from benchmarks.report import JsonFile, check_files, check_kernels, conclude, show, write_json
from benchmarks.steps.peers import need_peft
from weft.cli.demo import write_skill
from weft.engine.engine import Engine
from weft.engine.events import StepDone
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.progress import learning_rate, warmup_steps
from weft.kernels.device import default_device, is_gpu
from weft.model.load import load_backbone, load_plain_model
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

SKILLS = ("reverse", "shout", "drop_vowels", "next_letter")
NUM_SEEDS = 3
CAPACITY = 2048


@dataclass(frozen=True)
class Curves:
    """What a training run left."""

    losses: dict[str, list[float]]
    eval_losses: dict[str, float]
    adapters: dict[str, list[torch.Tensor]]
    jobs: dict[str, LiveJob]
    starts: dict[str, dict[str, tuple[torch.Tensor, ...]]]


def measure_curves(device: torch.device, steps: int, kernels: str, show: Callable[[str], None]) -> list[Figure]:
    """The figures of this file; `steps` for each job."""
    dtype = "bfloat16" if is_gpu(device) else "float32"
    spec = BackboneSpec("tiny", dtype=dtype, device=device.type, kernels=kernels)
    figures: list[Figure] = []

    def add(*found: Figure) -> None:
        for figure in found:
            figures.append(figure)
            show(f"  {figure.line}")

    with tempfile.TemporaryDirectory() as name:
        jobs = [_job(skill, seed, Path(name), steps) for seed in range(NUM_SEEDS) for skill in SKILLS]
        together = _train(spec, jobs)
        show(f"tiny  {len(jobs)} jobs of {steps} steps together, {dtype}")
        add(*_against_peft(spec, together, [job.name for job in jobs[: len(SKILLS)]]))
        add(_fp8_figure(together, _train(replace(spec, quantize="fp8"), jobs)))
        first = jobs[0].name
        alone = _train(spec, jobs[:1])
        pairs = zip(alone.adapters[first], together.adapters[first], strict=True)
        add(Figure("curve_bits", sum(int((one != other).sum()) for one, other in pairs), Kind.DIFFERENCES, 0.0))
    return figures


def _fp8_figure(plain: Curves, rounded: Curves) -> Figure:
    """Summed over skills and seeds."""
    ratio = sum(rounded.eval_losses.values()) / sum(plain.eval_losses.values())
    apart = {name: rounded.eval_losses[name] / loss - 1 for name, loss in plain.eval_losses.items()}
    low, high = min(apart, key=apart.__getitem__), max(apart, key=apart.__getitem__)
    detail = f"single jobs from {apart[low]:+.1%} ({low}) to {apart[high]:+.1%} ({high})"
    return Figure("curve_fp8_eval", ratio - 1, Kind.OVERHEAD, 0.01, detail=detail)


def _job(skill: str, seed: int, folder: Path, steps: int) -> JobSpec:
    train, _ = write_skill(folder / skill, skill, train=400, held=1)
    return JobSpec(
        f"{skill}-{seed}",
        (str(train),),
        eval_data=32,
        adapter=AdapterSpec(r=8),
        max_steps=steps,
        eval_steps=steps,
        global_batch_size=8,
        learning_rate=2e-3,
        max_length=128,
        train_on_inputs=True,
        seed=len(SKILLS) * seed + SKILLS.index(skill),
    )


def _train(spec: BackboneSpec, jobs: list[JobSpec]) -> Curves:
    engine = Engine(load_backbone(spec), capacity=CAPACITY)
    for job in jobs:
        engine.submit(job)
    starts = {name: engine.executor.adapter_of(name) for name in engine.jobs}
    losses: dict[str, list[float]] = {job.name: [] for job in jobs}
    for event in engine.events():
        if isinstance(event, StepDone):
            losses[event.job].append(event.loss)
    evals = {}
    for name, live in engine.jobs.items():
        assert live.best_eval is not None, f"{name} {live.state}: {live.reason}"
        evals[name] = live.best_eval
    adapters = {name: [t for pair in engine.executor.adapter_of(name).values() for t in pair] for name in engine.jobs}
    return Curves(losses, evals, adapters, engine.jobs, starts)


def _against_peft(spec: BackboneSpec, mine: Curves, names: list[str]) -> list[Figure]:
    """How far each step's loss is from PEFT's, over the mean loss of its job."""
    halves = spec.dtype == "bfloat16"
    gaps: dict[str, list[float]] = {"vs_peft": [], "to_fp32": [], "theirs_to_fp32": []}
    for name in names:
        ours = np.array(mine.losses[name])
        theirs = np.array(_peft_losses(spec, mine.jobs[name], mine.starts[name]))
        gaps["vs_peft"].append(_gap(ours, theirs))
        if halves:
            exact = np.array(_peft_losses(spec, mine.jobs[name], mine.starts[name], in_fp32=True))
            gaps["to_fp32"].append(_gap(ours, exact))
            gaps["theirs_to_fp32"].append(_gap(theirs, exact))
    detail = ", ".join(f"{name} {gap:.2%}" for name, gap in zip(names, gaps["vs_peft"], strict=True))
    found = [
        Figure("curve_vs_peft", max(gaps["vs_peft"]), Kind.OVERHEAD, None if halves else 1e-4, detail=detail),
    ]
    if halves:
        ratio = float(np.mean(gaps["to_fp32"]) / np.mean(gaps["theirs_to_fp32"]))
        detail = f"Weft {np.mean(gaps['to_fp32']):.2%}, PEFT {np.mean(gaps['theirs_to_fp32']):.2%} from fp32"
        found.append(Figure("curve_rounding", ratio, Kind.TIME_RATIO, 1.25, detail=detail))
    return found


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean() / other.mean())


def _peft_losses(
    spec: BackboneSpec, job: LiveJob, start: dict[str, tuple[torch.Tensor, ...]], *, in_fp32: bool = False
) -> list[float]:
    """The job alone, as its owner would train it with PEFT: fp32 adapters, bf16 products by autocast."""
    from peft import LoraConfig, get_peft_model

    plain = load_plain_model(spec)
    if in_fp32:
        plain = plain.float()
    r = job.spec.adapter.r
    config = LoraConfig(task_type="CAUSAL_LM", r=r, lora_alpha=2 * r, target_modules=list(start))
    model: Any = get_peft_model(plain, config)
    with torch.no_grad():
        for path, (a_RD, b_OR) in start.items():
            module = model.get_submodule(f"base_model.model.{path}")
            module.lora_A["default"].weight.copy_(a_RD)
            module.lora_B["default"].weight.copy_(b_OR)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = job.spec
    optimizer = torch.optim.AdamW(
        trained, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    losses = []
    warmup = warmup_steps(settings.warmup_steps, job.num_steps)
    for step in range(job.num_steps):
        kind = settings.lr_scheduler_type
        optimizer.param_groups[0]["lr"] = learning_rate(
            kind, settings.learning_rate, step, job.num_steps, warmup, settings.lr_scheduler_kwargs
        )
        loss = _batch_loss(model, job, step)
        loss.backward()
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _batch_loss(model: Any, job: LiveJob, step: int) -> torch.Tensor:
    """Mean cross entropy over the supervised tokens of a global batch, run as one padded batch."""
    samples = [job.data.train.samples[i] for i in job.progress.order.batch(step)]
    longest = max(sample.length for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        tokens = torch.from_numpy(sample.tokens.astype("int64"))
        ids[row, : sample.length] = tokens
        labels[row, : sample.length] = torch.where(torch.from_numpy(sample.supervised.copy()), tokens, -100)
    device = model.device
    mask = torch.arange(longest)[None, :] < torch.tensor([sample.length for sample in samples])[:, None]
    halves = model.dtype is torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16, enabled=halves):
        logits = model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits
    targets = labels[:, 1:].flatten().to(device)
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    mean: torch.Tensor = total / sum(sample.num_supervised for sample in samples)
    return mean


def curve(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each job.", min=1)] = 100,
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Loss curves on the embedded model: beside PEFT, FP8 beside unquantised, and bits."""
    check_kernels(kernels)
    check_files(json, None)
    need_peft()
    device = default_device()
    figures = measure_curves(device, steps, kernels, show)
    if json is not None:
        write_json(json, {found.key: found.value for found in figures}, device)
    raise typer.Exit(conclude(figures, [], device, None))
