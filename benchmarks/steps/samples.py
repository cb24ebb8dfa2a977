"""Random samples for a workload: the same on every machine, drawn from fixed seeds."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.steps.regimes import Workload
from weft.data.sample import Sample

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
