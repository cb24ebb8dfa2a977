"""What is measured, as data: workloads and their samples, the programs that run them, and the figures made of them.

A figure compares a run of Weft with a run of a peer on the same shape and the same kind of samples. The targets are for
one NVIDIA H200. On a shape without targets of its own the same comparisons are made, and their keys begin with the
shape's name.

Samples are random and the same on every machine, drawn from fixed seeds.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.figures import Kind
from weft.data.samples import Sample
from weft.errors import ConfigError, closest
from weft.model.load import Storage

MAIN_SHAPE = "llama-3.1-8b"
MIXED_RANKS = (8,) * 16 + (16,) * 8 + (32,) * 4 + (64,) * 2 + (128, 256)
"""Ranks of 32 jobs, each size together as wide as any other but the largest."""


class BenchProgram(enum.StrEnum):
    """What runs a workload."""

    WEFT = "weft"
    WEFT_FROZEN = "weft_frozen"
    """Weft's own stack without adapters: forward, and the gradient back to the embeddings."""
    WEFT_ENGINE = "weft_engine"
    """Weft's whole engine: planning, packing, metrics on disk and events too."""
    WEFT_BITS = "weft_bits"
    """Weft's gradients of one job alone and beside the others, compared bit by bit."""
    HF_FROZEN = "hf_frozen"
    """The transformers model without adapters, likewise; best batch."""
    PEFT_BEST = "peft_best"
    """One adapter, right-padded batches of the best size."""
    LIGER_BEST = "peft_liger_best"
    """The same with Liger's kernels."""
    PEFT_SOLO = "peft_solo"
    """One job after another, one sample per step."""
    ROOFLINE = "roofline"
    """Matrix products alone, forward in FP8 and backward in bf16, at the rates this device reaches."""


PEFT_PROGRAMS = (BenchProgram.PEFT_BEST, BenchProgram.LIGER_BEST, BenchProgram.PEFT_SOLO)
OURS = (BenchProgram.WEFT, BenchProgram.WEFT_FROZEN, BenchProgram.WEFT_ENGINE, BenchProgram.WEFT_BITS)


@dataclass(frozen=True)
class Workload:
    """Jobs and their samples, as one microbatch."""

    ranks: tuple[int, ...]
    lengths: tuple[int, int]
    """Shortest and longest sample; between them all are equally likely."""
    capacity: int
    """Rows of the microbatch."""
    dropout: float = 0.0

    @property
    def lengths_text(self) -> str:
        """The lengths in a few characters, for names."""
        shortest, longest = self.lengths
        return f"{longest}" if shortest == longest else f"{shortest}to{longest}"

    @property
    def jobs_text(self) -> str:
        """The jobs in a few characters, for names."""
        return f"{len(self.ranks)}{'_mixed' if len(set(self.ranks)) > 1 else ''}"


BF16, FP8, INT8, NF4 = Storage(), Storage("fp8"), Storage("int8"), Storage("nf4")
BF16_RECOMPUTED, BF16_OFFLOADED = Storage(recompute="mlp"), Storage(recompute="mlp", offload=True)
FP8_RECOMPUTED = Storage("fp8", "mlp")
"""For a model whose activations would not fit beside its weights."""


@dataclass(frozen=True)
class BenchRun:
    """One measurement: a program on a workload."""

    program: BenchProgram
    workload: Workload
    storage: Storage = BF16

    @property
    def key(self) -> str:
        """Its name among the figures."""
        if self.program is BenchProgram.ROOFLINE:
            return str(self.program)
        if self.program not in OURS:
            # Peers train one job, however many there are.
            return f"{self.program}_{self.workload.lengths_text}"
        return f"{self.program}{self.storage.text}_{self.workload.jobs_text}_of_{self.workload.lengths_text}"


@dataclass(frozen=True)
class Regime:
    """One figure of the report."""

    key: str
    ours: BenchRun
    kind: Kind
    peer: BenchRun | None = None
    target: float | None = None
    """For tokens/s: the part of the peer's that must be reached."""

    @property
    def runs(self) -> tuple[BenchRun, ...]:
        """What must be measured for it."""
        return (self.ours,) if self.peer is None else (self.peer, self.ours)


FOUR = Workload((16,) * 4, (512, 1024), 8192)
SWEEP16 = Workload((16,) * 16, (512, 512), 8192)
SWEEP32 = Workload((16,) * 32, (256, 256), 8192)
MIXED32 = Workload(MIXED_RANKS, (256, 256), 8192)
RAGGED32 = Workload((8, 16, 32, 64) * 8, (256, 512), 12800)
"""A sweep of 32 configurations of batch 1: one sample each fills the microbatch."""
TINY16 = Workload((16,) * 16, (256, 256), 4096)
TINY4 = Workload((16,) * 4, (512, 512), 8192)
LONG = Workload((16,), (32768, 32768), 32768)
HUGE4 = Workload((16,) * 4, (512, 1024), 6144)
HANDFUL = Workload((4, 8), (24, 48), 128)
FEW = Workload((4,) * 4, (32, 32), 128)


def _step(key: str, storage: Storage, peer: BenchProgram, target: float | None, workload: Workload = FOUR) -> Regime:
    return Regime(key, BenchRun(BenchProgram.WEFT, workload, storage), Kind.SPEEDUP, BenchRun(peer, workload), target)


def _overhead(key: str, workload: Workload, target: float) -> Regime:
    frozen = BenchRun(BenchProgram.WEFT_FROZEN, workload)
    return Regime(key, BenchRun(BenchProgram.WEFT, workload), Kind.OVERHEAD, frozen, target)


def _engine(key: str, workload: Workload, target: float | None) -> Regime:
    """What the whole engine reaches of the speed of bare steps."""
    return Regime(
        key, BenchRun(BenchProgram.WEFT_ENGINE, workload), Kind.SPEEDUP, BenchRun(BenchProgram.WEFT, workload), target
    )


def _speed(key: str, workload: Workload, storage: Storage) -> Regime:
    return Regime(key, BenchRun(BenchProgram.WEFT, workload, storage), Kind.TOKENS_PER_S)


MAIN = (
    _step("step_bf16_vs_peft", BF16, BenchProgram.PEFT_BEST, 2.0),
    _step("step_bf16_vs_liger", BF16, BenchProgram.LIGER_BEST, 1.7),
    _step("step_bf16_vs_hf_frozen", BF16, BenchProgram.HF_FROZEN, None),
    _step("sweep16_bf16", BF16, BenchProgram.PEFT_SOLO, 7.0, SWEEP16),
    _step("sweep32", BF16, BenchProgram.PEFT_SOLO, 13.0, SWEEP32),
    _overhead("overhead4", FOUR, 0.06),
    _overhead("overhead32", MIXED32, 0.10),
    _engine("engine16", SWEEP16, 0.98),
    Regime("peak_gb_8192", BenchRun(BenchProgram.WEFT, FOUR), Kind.PEAK_GB, None, 45.0),
    Regime("bits_differing", BenchRun(BenchProgram.WEFT_BITS, SWEEP32), Kind.DIFFERENCES, None, 0.0),
    Regime("bits_differing_fp8", BenchRun(BenchProgram.WEFT_BITS, SWEEP32, FP8), Kind.DIFFERENCES, None, 0.0),
    _step("step_fp8_vs_peft", FP8, BenchProgram.PEFT_BEST, 3.0),
    _step("step_fp8_vs_liger", FP8, BenchProgram.LIGER_BEST, 2.5),
    _step("sweep16_fp8", FP8, BenchProgram.PEFT_SOLO, 9.0, SWEEP16),
    _speed("step_int8_tok_s", FOUR, INT8),
    _speed("step_nf4_tok_s", FOUR, NF4),
    _speed("fits_32k_tok_s", LONG, BF16_RECOMPUTED),
    _speed("fits_32k_offload_tok_s", LONG, BF16_OFFLOADED),
    _step("sweep32_8b", BF16, BenchProgram.PEFT_SOLO, 10.0, RAGGED32),
)
REGIMES: dict[str, tuple[Regime, ...]] = {
    MAIN_SHAPE: MAIN,
    "tinyllama-1.1b": (
        _step("tiny16", BF16, BenchProgram.PEFT_SOLO, 42.0, TINY16),
        _step("tiny4", BF16, BenchProgram.PEFT_BEST, 2.5, TINY4),
        _engine("engine16_tiny", TINY16, 0.97),
        _step("sweep32_tiny", BF16, BenchProgram.PEFT_SOLO, 40.0, RAGGED32),
    ),
    "qwen2.5-3b": (_step("sweep32_3b", BF16, BenchProgram.PEFT_SOLO, 20.0, RAGGED32),),
    "llama-3.1-70b": (
        Regime(
            "fits_70b_tok_s",
            BenchRun(BenchProgram.WEFT, HUGE4, FP8_RECOMPUTED),
            Kind.TOKENS_PER_S,
            BenchRun(BenchProgram.ROOFLINE, HUGE4),
            0.6,
        ),
    ),
    "tiny": (
        Regime(
            "tiny.step_vs_peft",
            BenchRun(BenchProgram.WEFT, HANDFUL),
            Kind.SPEEDUP,
            BenchRun(BenchProgram.PEFT_BEST, HANDFUL),
            None,
        ),
        Regime(
            "tiny.sweep4", BenchRun(BenchProgram.WEFT, FEW), Kind.SPEEDUP, BenchRun(BenchProgram.PEFT_SOLO, FEW), None
        ),
        _engine("tiny.engine4", FEW, None),
        Regime("tiny.bits_differing", BenchRun(BenchProgram.WEFT_BITS, FEW), Kind.DIFFERENCES, None, 0.0),
        Regime(
            "tiny.overhead2",
            BenchRun(BenchProgram.WEFT, HANDFUL),
            Kind.OVERHEAD,
            BenchRun(BenchProgram.WEFT_FROZEN, HANDFUL),
            None,
        ),
    ),
}
"""Figures by shape; `regimes_of` answers for the shapes without a row."""


def regimes_of(shape: str) -> tuple[Regime, ...]:
    """The figures of a shape; one without targets of its own gets the main comparisons."""
    if shape in REGIMES:
        return REGIMES[shape]
    return tuple(replace(regime, key=f"{shape}.{regime.key}", target=None) for regime in MAIN)


def choose(shapes: Sequence[str], names: Sequence[str]) -> dict[str, tuple[Regime, ...]]:
    """The named figures of the named shapes; without names, all of them."""
    chosen = shapes or [shape for shape in REGIMES if shape != "tiny"]
    offered = {shape: regimes_of(shape) for shape in chosen}
    keys = [regime.key for regimes in offered.values() for regime in regimes]
    for name in names:
        if name not in keys:
            guess = closest(name, keys)
            raise ConfigError(
                f"there is no regime {name!r} on {', '.join(chosen)}; accepted are {', '.join(keys)}.",
                where="--regime",
                hint=f"Did you mean {guess}?" if guess else None,
            )
    picked = {s: tuple(r for r in regimes if not names or r.key in names) for s, regimes in offered.items()}
    return {shape: regimes for shape, regimes in picked.items() if regimes}


SEED = 20260101
IGNORED = -100
"""The label transformers leaves out of the loss."""


def packed_samples(workload: Workload, vocabulary: int) -> list[list[Sample]]:
    """Samples of every job that together fill one microbatch, first fit; each job has at least one."""
    rng = np.random.default_rng(SEED)
    shortest, longest = workload.lengths
    num_jobs = len(workload.ranks)
    lengths: list[list[int]] = [[] for _ in range(num_jobs)]
    room, taken = workload.capacity, 0
    for _ in range(8 * workload.capacity // shortest):
        length = int(rng.integers(shortest, longest + 1))
        if length <= room:
            lengths[taken % num_jobs].append(length)
            room, taken = room - length, taken + 1
    assert taken >= num_jobs, "the capacity of a workload holds a sample of every job"
    return [[_sample(rng, length, vocabulary) for length in own] for own in lengths]


def _sample(rng: np.random.Generator, length: int, vocabulary: int) -> Sample:
    tokens = rng.integers(0, vocabulary, length, dtype=np.int32)
    return Sample(tokens, np.ones(length, dtype=np.bool_))


def padded_batch(
    lengths: tuple[int, int], size: int, number: int, vocabulary: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], int]:
    """Inputs of a transformers model, right-padded to their longest sample, and how many tokens are real."""
    rng = np.random.default_rng([SEED, size, number])
    drawn = rng.integers(lengths[0], lengths[1] + 1, size)
    ids = torch.from_numpy(rng.integers(0, vocabulary, (size, drawn.max())))
    real = torch.arange(int(drawn.max()))[None, :] < torch.from_numpy(drawn)[:, None]
    batch = {"input_ids": ids, "labels": torch.where(real, ids, IGNORED)}
    if not bool(real.all()):
        batch["attention_mask"] = real.long()
    return {name: tensor.to(device) for name, tensor in batch.items()}, int(drawn.sum())
