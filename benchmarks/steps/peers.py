"""What people run today, at its best: Hugging Face PEFT, PEFT with Liger's kernels, and the bare transformers model.

The peers train what Weft trains: adapters and optimizer in fp32, as is PEFT's own default, products in bf16 by
autocast, as transformers' Trainer does with bf16. Beyond that they get every doubt: one fused AdamW, no gradient
clipping, no reading of the loss, and the batch size that serves them best. Tokens of padding do not count, as no one
trains on them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.clock import Effort, Measured, peak_gb, release
from benchmarks.steps.regimes import BenchProgram, BenchRun, padded_batch
from weft.errors import MissingExtraError, install_command
from weft.kernels.device import is_gpu
from weft.kernels.device_event import median_s
from weft.model.load import build
from weft.plan.cost.shape import Shape

RANK = 16
ENOUGH_GAIN = 1.01
"""A larger batch that gives less than this much more ends the search."""


@dataclass(frozen=True)
class Missing:
    """A peer cannot run here."""

    reason: str


def measure_peers(
    shape: Shape, runs: Sequence[BenchRun], dtype: torch.dtype, device: torch.device, effort: Effort
) -> Iterator[tuple[BenchRun, Measured | Missing]]:
    """Each run's result as it comes; a model is built once for all runs that can share it."""
    plain = [
        run for run in runs if run.program in (BenchProgram.HF_FROZEN, BenchProgram.PEFT_BEST, BenchProgram.PEFT_SOLO)
    ]
    # Before the adapters are put in.
    plain.sort(key=lambda run: run.program is not BenchProgram.HF_FROZEN)
    if plain:
        yield from _measure_on(build(shape, dtype, device, "sdpa"), plain, device, effort)
    release(device)
    liger = [run for run in runs if run.program is BenchProgram.LIGER_BEST]
    if not liger:
        return
    reason = _no_liger(device)
    if reason:
        yield from ((run, Missing(reason)) for run in liger)
        return
    model = build(shape, dtype, device, "sdpa")
    with liger_kernels(model):
        yield from _measure_on(model, liger, device, effort)
    del model
    release(device)


def _no_liger(device: torch.device) -> str | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({install_command('bench')})"
    return None if is_gpu(device) else "Liger's kernels need a GPU"


def _measure_on(
    model: Any, runs: Sequence[BenchRun], device: torch.device, effort: Effort
) -> Iterator[tuple[BenchRun, Measured]]:
    adapted: Any = None
    for run in runs:
        if run.program is BenchProgram.HF_FROZEN:
            yield run, best_batch(frozen_steps(model), run, model.config.vocab_size, device, effort)
            continue
        adapted = adapted or with_adapter(model, run.workload.dropout)
        sizes = (1,) if run.program is BenchProgram.PEFT_SOLO else effort.batch_sizes
        yield run, best_batch(adapter_steps(adapted), run, model.config.vocab_size, device, effort, sizes)


PeerStep = Callable[[dict[str, torch.Tensor]], None]
"""Trains on one batch."""


def frozen_steps(model: Any) -> PeerStep:
    """Forward, and the gradient back to the embeddings, without any adapter."""
    model.train()

    def step(batch: dict[str, torch.Tensor]) -> None:
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        embeds = model.get_input_embeddings()(batch["input_ids"]).requires_grad_()
        model(inputs_embeds=embeds, **rest).loss.backward()

    return step


def need_peft() -> None:
    """PEFT is installed, or a clear sentence has the command that installs it."""
    if importlib.util.find_spec("peft") is None:
        hint = f"Install it: {install_command('bench')}."
        raise MissingExtraError("PEFT, which Weft is measured beside, is not installed.", hint=hint)


def with_adapter(model: Any, dropout: float) -> Any:
    """The model with one LoRA adapter on all linears but the head."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=dropout, target_modules="all-linear")
    return get_peft_model(model, config).train()


def adapter_steps(model: Any) -> PeerStep:
    """Forward, backward and optimizer step of the model's adapter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    halves = model.dtype is torch.bfloat16

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=halves):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def best_batch(
    step: PeerStep,
    run: BenchRun,
    vocabulary: int,
    device: torch.device,
    effort: Effort,
    sizes: Sequence[int] | None = None,
) -> Measured:
    """The fastest of the batch sizes, tried upward until memory ends or nothing is gained."""
    best: Measured | None = None
    for size in sizes or effort.batch_sizes:
        release(device)
        try:
            found = _at_size(step, run, size, vocabulary, device, effort)
        except torch.OutOfMemoryError:
            if best is None:
                raise
            break
        if best is not None and found.tokens_per_s < ENOUGH_GAIN * best.tokens_per_s:
            best = max(best, found, key=lambda measured: measured.tokens_per_s)
            break
        best = found
    release(device)
    assert best is not None, "there is a batch size to try"
    return best


def _at_size(
    step: PeerStep, run: BenchRun, size: int, vocabulary: int, device: torch.device, effort: Effort
) -> Measured:
    """Totals over a few batches, each timed by itself: batches of different lengths differ in padding."""
    shortest, longest = run.workload.lengths
    tokens = rows = 0
    seconds = 0.0
    for number in range(1 if shortest == longest else effort.num_batches):
        batch, real = padded_batch(run.workload.lengths, size, number, vocabulary, device)
        # Later batches meet a warm program; only the allocator has to see their sizes.
        warmups = effort.warmups if number == 0 else 1
        times = replace(effort, warmups=warmups).times
        seconds += median_s(lambda batch=batch: step(batch), device, **times)  # type: ignore[misc]
        tokens, rows = tokens + real, rows + batch["input_ids"].numel()
    return Measured(tokens, rows, seconds, peak_gb(device), f"batch {size}")


@contextmanager
def liger_kernels(model: Any) -> Iterator[None]:
    """Liger's kernels in this model; what Liger changes in transformers itself is put back at the end."""
    from liger_kernel.transformers import (  # type: ignore[import-not-found,unused-ignore]
        _apply_liger_kernel_to_instance,
    )

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        _apply_liger_kernel_to_instance(model=model)
        yield
    finally:
        vars(module).update(before)
