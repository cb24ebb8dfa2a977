"""One microbatch, made from samples with their slots: arrays on the host, tensors on first use.

Row i of a segment holds token i and predicts token i + 1. Shape suffixes: T rows, N supervised rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.routing import Rows, SlotRows, slot_rows
from weft.data.samples import Sample
from weft.kernels.device import is_cpu, is_gpu
from weft.kernels.device_event import sent
from weft.kernels.dropout import row_keys
from weft.kernels.layers.attention import AttentionBlocks, attention_blocks
from weft.kernels.lora.tables import BARE, SampleRows
from weft.model.loss import DistillationRows
from weft.model.objective_loss import LabelledRows, ReferenceRows, ScoredGroups, find_scored_groups
from weft.model.packing.attention import needs_bounds
from weft.objectives.distillation import Distillation
from weft.objectives.heads import HeadObjective
from weft.objectives.objective import LikelihoodObjective

ADAPTER_WINDOW = 64
"""Rows per adapter product on a CPU; divides the tile of frozen products. Fixed, so that no row's result depends on
its neighbours; smaller wastes less on short jobs, larger needs fewer calls for long ones."""
GPU_ADAPTER_WINDOW = 1024
"""The same on a GPU, which small products would leave idle."""


@dataclass(frozen=True)
class SlotSample:
    sample: Sample
    slot: int | None = None
    weight: float = 1.0
    """Weight in the gradient of a supervised token of weight 1, or of a whole group: 1 / the global batch's divisor."""
    dropout_key: int | None = None
    step_key: int | None = None
    """Number derived from its job's seed and step, in training."""
    is_separate: bool = False
    """Whether its slot processes it alone, as order-independent sums need; else neighbours of a slot are joined."""
    position: int = 0
    """Position of its first token; above 0 if earlier tokens are cached."""
    objective: LikelihoodObjective | None = None
    """Objective that weights its tokens by their log-probabilities, if any; its group's samples are adjacent."""
    head: HeadObjective | None = None
    """Objective that trains the head of its slot on its labels, if any; then no other loss applies."""
    reference: ReferenceRows | None = None
    """Values of the reference that the objective compares with; known when the microbatch runs."""
    distillation: Distillation | None = None
    """Objective that trains its tokens on its teacher's distribution, if any; then no other loss applies."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    device: torch.device
    ids: np.ndarray
    positions: np.ndarray
    keys: np.ndarray
    drops: bool
    segments: tuple[Rows, ...]
    segment_slots: tuple[int | None, ...]
    step_keys: tuple[int | None, ...]
    """Number derived from the job's seed and step for each segment; None in evaluation."""
    apart: tuple[bool, ...]
    """For each segment, whether its slot processes it alone."""
    is_tiled: bool
    supervised: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    counts: tuple[int, ...]
    """Number of supervised rows of each segment; N-long arrays are in segment order."""
    importance: np.ndarray | None
    """Weight of each supervised row within its job; None if all are equal."""
    scored_groups: tuple[ScoredGroups, ...]
    """Groups whose rows get their weights from log-probabilities."""
    heads: tuple[LabelledRows, ...] = ()
    taught: tuple[DistillationRows, ...] = ()
    references: tuple[ReferenceRows | None, ...] = ()
    """Reference values for each segment's objective; all must be known before the loss."""

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @functools.cached_property
    def input_ids_T(self) -> torch.Tensor:
        return self._tensor(self.ids)

    @functools.cached_property
    def positions_T(self) -> torch.Tensor:
        return self._tensor(self.positions)

    @functools.cached_property
    def keys_T(self) -> torch.Tensor:
        return self._tensor(self.keys)

    @property
    def dropout_keys_T(self) -> torch.Tensor | None:
        return self.keys_T if self.drops else None

    @functools.cached_property
    def supervised_N(self) -> torch.Tensor:
        return self._tensor(self.supervised)

    @functools.cached_property
    def targets_N(self) -> torch.Tensor:
        return self._tensor(self.targets)

    @functools.cached_property
    def weights_N(self) -> torch.Tensor:
        return self._tensor(self.weights)

    @functools.cached_property
    def spans(self) -> tuple[SampleRows, ...]:
        """The segments, as kernels' tables have them."""
        pairs = zip(self.segments, self.segment_slots, strict=True)
        return tuple(SampleRows(rows.start, rows.end, BARE if slot is None else slot) for rows, slot in pairs)

    @functools.cached_property
    def blocks(self) -> AttentionBlocks | None:
        """As in `Routing`."""
        if not is_gpu(self.device) or needs_bounds(self.device):
            return None
        lines = attention_blocks(self.spans, self.num_rows, len(self.spans))
        return AttentionBlocks(self._tensor(lines), self.spans)

    @functools.cached_property
    def bounds(self) -> torch.Tensor | None:
        """As in `Routing`."""
        return self._tensor(np.array(self._edges, dtype=np.int32)) if needs_bounds(self.device) else None

    @property
    def longest(self) -> int:
        """Number of rows of the longest segment, padding included."""
        return max(end - start for start, end in itertools.pairwise(self._edges))

    @functools.cached_property
    def slots(self) -> tuple[SlotRows, ...]:
        """Neighbouring segments of one slot, joined unless they are processed alone."""
        window = None
        if self.is_tiled:
            window = ADAPTER_WINDOW if is_cpu(self.device) else min(GPU_ADAPTER_WINDOW, self.num_rows)
        found = []
        alone = [index if is_separate else -1 for index, is_separate in enumerate(self.apart)]
        owned = zip(zip(self.segment_slots, self.step_keys, alone, strict=True), self.segments, strict=True)
        for (slot, key, _), group in itertools.groupby(owned, key=lambda pair: pair[0]):
            if slot is not None:
                own = [segment for _, segment in group]
                begins = [segment.start for segment in own if self.positions[segment.start] == 0]
                found.append(slot_rows(slot, own, window, self.num_rows, begins, key))
        return tuple(found)

    def slots_at(self, rows: Sequence[int]) -> list[int | None]:
        """The slot of each row; padding counts to the last segment."""
        starts = [segment.start for segment in self.segments]
        return [self.segment_slots[index - 1] for index in np.searchsorted(starts, rows, side="right")]

    @property
    def _edges(self) -> list[int]:
        edges = [0, *(segment.end for segment in self.segments)]
        return edges if edges[-1] == self.num_rows else [*edges, self.num_rows]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(array), self.device)


def pack_samples(samples: Sequence[SlotSample], row_tile: int | None, device: torch.device) -> PackedBatch:
    """Puts one sample after another in one buffer, padded to whole tiles."""
    lengths = [p.sample.length for p in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    num_rows = starts[-1] if row_tile is None else -(-starts[-1] // row_tile) * row_tile
    ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    keys = np.zeros(num_rows, dtype=np.int32)
    rows, targets, weights, counts = [], [], [], []
    is_weighted = any(item.sample.weights is not None for item in samples)
    importance: list[np.ndarray] = []
    for item, start, length in zip(samples, starts, lengths, strict=False):
        ids[start : start + length] = item.sample.tokens
        positions[start : start + length] = np.arange(item.position, item.position + length)
        if item.dropout_key is not None:
            keys[start : start + length] = row_keys(item.dropout_key, length)
        is_other = item.head is not None or item.distillation is not None
        predicted = np.empty(0, np.int64) if is_other else _predicted(item.sample)
        rows.append(predicted - 1 + start)
        targets.append(item.sample.tokens[predicted])
        own = item.sample.weights
        importance.append(np.ones(len(predicted)) if own is None else own[predicted])
        weights.append((importance[-1] * item.weight).astype(np.float32))
        counts.append(len(predicted))
    return PackedBatch(
        device=device,
        ids=ids,
        positions=positions,
        keys=keys,
        drops=any(item.dropout_key is not None for item in samples),
        segments=tuple(Rows(start, start + length) for start, length in zip(starts, lengths, strict=False)),
        segment_slots=tuple(item.slot for item in samples),
        step_keys=tuple(item.step_key for item in samples),
        apart=tuple(item.is_separate for item in samples),
        is_tiled=row_tile is not None,
        supervised=np.concatenate(rows).astype(np.int64),
        targets=np.concatenate(targets).astype(np.int64),
        weights=np.concatenate(weights).astype(np.float32),
        counts=tuple(counts),
        importance=np.concatenate(importance) if is_weighted else None,
        scored_groups=find_scored_groups(
            [item.objective for item in samples],
            counts,
            [item.weight for item in samples],
            [math.nan if item.sample.labels is None else item.sample.label for item in samples],
            [item.reference for item in samples],
        ),
        heads=_labelled_rows(samples, starts),
        taught=_distillation_rows(samples, starts),
        references=tuple(item.reference for item in samples),
    )


def _labelled_rows(samples: Sequence[SlotSample], starts: Sequence[int]) -> tuple[LabelledRows, ...]:
    of_slots: dict[int, list[int]] = {}
    for segment, item in enumerate(samples):
        # A stage of a pipeline that holds no part of an adapter has no slot for it; its head is on the last one.
        if item.head is not None and item.slot is not None:
            of_slots.setdefault(item.slot, []).append(segment)
    found = []
    for slot, segments in of_slots.items():
        objective, labels = samples[segments[0]].head, [samples[s].sample.labels for s in segments]
        assert objective is not None
        own = [np.flatnonzero(~np.isnan(each)) for each in labels if each is not None]
        counts = [len(rows) for rows in own]
        given = [each[rows] for each, rows in zip(labels, own, strict=True) if each is not None]
        found.append(
            LabelledRows(
                slot=slot,
                objective=objective,
                rows=np.concatenate([rows + starts[s] for rows, s in zip(own, segments, strict=True)]),
                labels=np.concatenate(given).astype(np.float32),
                shares=np.repeat(np.array([samples[s].weight for s in segments], dtype=np.float32), counts),
                segments=np.repeat(np.array(segments), counts),
            )
        )
    return tuple(found)


def _distillation_rows(samples: Sequence[SlotSample], starts: Sequence[int]) -> tuple[DistillationRows, ...]:
    of_objectives: dict[tuple[Distillation, int | None], list[int]] = {}
    for segment, item in enumerate(samples):
        if item.distillation is not None:
            assert item.reference is not None, "a teacher speaks of every sample"
            of_objectives.setdefault((item.distillation, item.reference.num_reference_values), []).append(segment)
    found = []
    for (objective, _), segments in of_objectives.items():
        own = [_predicted(samples[s].sample) for s in segments]
        counts = [len(tokens) for tokens in own]
        teacher = tuple(each for s in segments if (each := samples[s].reference) is not None)
        found.append(
            DistillationRows(
                objective=objective,
                rows=np.concatenate([tokens - 1 + starts[s] for tokens, s in zip(own, segments, strict=True)]),
                targets=np.concatenate(
                    [samples[s].sample.tokens[tokens] for tokens, s in zip(own, segments, strict=True)]
                ).astype(np.int64),
                shares=np.repeat(np.array([samples[s].weight for s in segments], dtype=np.float32), counts),
                segments=np.repeat(np.array(segments), counts),
                teacher=teacher,
            )
        )
    return tuple(found)


def _predicted(sample: Sample) -> np.ndarray:
    return np.flatnonzero(sample.supervised[1:]) + 1
