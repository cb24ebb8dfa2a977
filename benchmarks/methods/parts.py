"""All that `python -m benchmarks methods` measures, beside PEFT's DoRA and DPO with PEFT.

mixed_vs_lora    tokens per second of eight jobs of different methods and objectives, over those of eight LoRAs; what
                 runs without an adapter, to compare with, goes forward only and counts half, and in
                 mixed_trained_vs_lora it does not count
foreign_cost     what a token takes longer among seven LoRAs when the eighth job is an IA³ instead of a LoRA;
                 microbatches that are its alone, if there are any, not counted
dora_vs_peft     four DoRAs, over one of PEFT's at the batch size that serves it best
dpo_vs_peft      four LoRAs on pairs over three epochs (the default of transformers' and TRL's trainers), over one of
                 PEFT's with two forward passes, likewise; tokens of pairs. Here a pair's reference runs in the
                 first epoch only: dpo_first_vs_peft is of that epoch, dpo_later_vs_peft of the others
memory32_ratio   32 times the peak of one job by itself, over the peak of 32 jobs on one backbone
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from benchmarks.clock import QUICK, THOROUGH, Effort, release
from benchmarks.figures import Kind, Parts, Targets
from benchmarks.methods.jobs import WARM_UP, MethodJobs, measure_pace
from benchmarks.report import (
    JsonFile,
    Quick,
    Regimes,
    measured_device,
    run_parts,
)
from benchmarks.steps.peers import RANK, PeerStep, adapter_steps, best_batch, need_peft, with_adapter
from benchmarks.steps.regimes import BF16, IGNORED, BenchProgram, BenchRun, Workload
from weft.errors import ConfigError
from weft.kernels.device import is_gpu
from weft.model.backbone import Backbone
from weft.model.load import build, make_backbone
from weft.plan.cost.shape import Shape, find_shape

BETA = 0.1


def measure_dora(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    """Tokens per second of PEFT's DoRA on all linears."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, use_dora=True, target_modules="all-linear")
    model = get_peft_model(build(shape, dtype, device, "sdpa"), config).train()
    return _fastest(adapter_steps(model), model, length, device, effort)


def measure_dpo(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    """Tokens of pairs per second of a LoRA on all linears; a batch's rows are pairs, one after the other."""
    model = with_adapter(build(shape, dtype, device, "sdpa"), 0.0)
    return _fastest(pair_steps(model), model, length, device, effort)


def pair_steps(model: Any) -> PeerStep:
    """DPO's sigmoid loss: forward, the same without the adapter, backward and optimizer step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    halves = model.dtype is torch.bfloat16

    def sums(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(labels.shape).sum(dim=1)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=halves):
            with torch.no_grad(), model.disable_adapter():
                references = sums(batch)
            gains = sums(batch) - references
            loss = -F.logsigmoid(BETA * (gains[::2] - gains[1::2])).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fastest(step: PeerStep, model: Any, length: int, device: torch.device, effort: Effort) -> float:
    run = BenchRun(BenchProgram.PEFT_BEST, Workload((RANK,), (length, length), length))
    try:
        return best_batch(step, run, model.config.vocab_size, device, effort).tokens_per_s
    finally:
        release(device)


TARGETS: Targets = {
    "mixed_vs_lora": (Kind.SHARE, 0.85),
    "mixed_trained_vs_lora": (Kind.SHARE, None),
    "foreign_cost": (Kind.OVERHEAD, 0.03),
    "dora_vs_peft": (Kind.SPEEDUP, 2.0),
    "dpo_vs_peft": (Kind.SPEEDUP, 2.0),
    "dpo_first_vs_peft": (Kind.SPEEDUP, None),
    "dpo_later_vs_peft": (Kind.SPEEDUP, None),
    "memory32_ratio": (Kind.SPEEDUP, 5.29),
}

EPOCHS = 3
"""Of a run on pairs."""


@dataclass
class MethodBench:
    """Measures one figure after another on a shape with random weights."""

    shape: Shape
    device: torch.device
    effort: Effort
    num_steps: int = 24
    """Of each job, beyond the warm-up."""

    @property
    def capacity(self) -> int:
        """Rows of a microbatch."""
        return 8192 if is_gpu(self.device) else 1024

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.capacity // 32

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if is_gpu(self.device) else torch.float32

    @functools.cached_property
    def backbone(self) -> Backbone:
        """The shape as a backbone."""
        return make_backbone(self.shape, BF16, self.dtype, self.device)

    def jobs(self, num_jobs: int) -> MethodJobs:
        """Makes jobs of which so many fill a microbatch."""
        steps = WARM_UP + self.num_steps
        widest = min(64, self.shape.kv_heads * self.shape.head_size)
        return MethodJobs(self.capacity // num_jobs, self.length, steps, self.backbone.vocabulary, widest)

    def mixed(self) -> dict[str, float]:
        """Eight jobs of different kinds beside eight LoRAs, in turn."""
        jobs = self.jobs(8)
        loras = [jobs.lora(number) for number in range(8)]
        ours = measure_pace(self.backbone, jobs.mixed(), self.capacity)
        theirs = measure_pace(self.backbone, loras, self.capacity)
        return {
            "mixed_vs_lora": ours.tokens_per_s / theirs.tokens_per_s,
            "mixed_trained_vs_lora": ours.trained_per_s / theirs.trained_per_s,
            "mixed_tok_s": ours.tokens_per_s,
            "lora8_tok_s": theirs.tokens_per_s,
        }

    def foreign(self) -> dict[str, float]:
        """Seven LoRAs with a foreign job and with a LoRA."""
        jobs = self.jobs(8)
        seven = [jobs.lora(number) for number in range(7)]
        foreign = measure_pace(self.backbone, [*seven, jobs.ia3(7)], self.capacity)
        alike = measure_pace(self.backbone, [*seven, jobs.lora(7)], self.capacity)
        return {"foreign_cost": foreign.seconds_per_token("ia3-7") / alike.seconds_per_token() - 1}

    def dora(self) -> dict[str, float]:
        """DoRA here and in PEFT."""
        jobs = self.jobs(4)
        ours = measure_pace(self.backbone, [jobs.dora(number) for number in range(4)], self.capacity)
        self._leave()
        theirs = measure_dora(self.shape, self.length, self.dtype, self.device, self.effort)
        return self._compared("dora", ours.tokens_per_s, theirs)

    def dpo(self) -> dict[str, float]:
        """Pairs here and in PEFT; what runs without the adapter is counted on neither side."""
        jobs = self.jobs(4)
        first = measure_pace(self.backbone, [jobs.dpo(number) for number in range(4)], self.capacity).trained_per_s
        again = replace(jobs, num_read=WARM_UP)
        later = measure_pace(self.backbone, [again.dpo(number) for number in range(4)], self.capacity).trained_per_s
        self._leave()
        theirs = measure_dpo(self.shape, self.length, self.dtype, self.device, self.effort)
        epochs = self._compared("dpo", EPOCHS / (1 / first + (EPOCHS - 1) / later), theirs)
        return {**epochs, "dpo_first_vs_peft": first / theirs, "dpo_later_vs_peft": later / theirs}

    def memory(self) -> dict[str, float]:
        """32 jobs on one backbone, and one that has a backbone to itself."""
        jobs = self.jobs(32)
        together = measure_pace(self.backbone, [jobs.lora(number) for number in range(32)], self.capacity)
        alone = measure_pace(self.backbone, [jobs.lora(0)], self.length)
        return {
            "memory32_ratio": 32 * alone.peak_gb / together.peak_gb,
            "memory32_gb": together.peak_gb,
            "memory1_gb": alone.peak_gb,
        }

    def _compared(self, name: str, ours: float, theirs: float) -> dict[str, float]:
        return {f"{name}_vs_peft": ours / theirs, f"{name}_tok_s": ours, f"{name}_peft_tok_s": theirs}

    def _leave(self) -> None:
        """Gives the backbone's memory back to a peer."""
        del self.backbone
        release(self.device)


def choose_parts(regimes: Sequence[str], bench: MethodBench) -> Parts:
    """The parts that measure those figures; all that this machine can measure if there are none."""
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "mixed_vs_lora": bench.mixed,
        "foreign_cost": bench.foreign,
        "dora_vs_peft": bench.dora,
        "dpo_vs_peft": bench.dpo,
        "memory32_ratio": bench.memory,
    }
    for name in regimes:
        if name not in measures:
            raise ConfigError(f"got {name!r}; accepted are {', '.join(measures)}.", where="--regime")
        if name == "memory32_ratio" and not is_gpu(bench.device):
            raise ConfigError(f"{name} needs a CUDA GPU and torch sees none.", where="--regime")
    can = [name for name in measures if name != "memory32_ratio" or is_gpu(bench.device)]
    return {name: measures[name] for name in regimes or can}


def methods(
    model: Annotated[str, typer.Option(help="Shape to build with random weights.")] = "llama-3.1-8b",
    regime: Regimes = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """PEFT methods and objectives mixed in one run, beside LoRA alone and beside PEFT."""
    shape = find_shape(model)
    device = measured_device(needs_gpu=shape.name != "tiny")
    need_peft()
    parts = choose_parts(regime or [], MethodBench(shape, device, QUICK if quick else THOROUGH))
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=[] if device.type == "cpu" else list(parts)))
