"""One microbatch, made from samples and where they go: arrays on the host, tensors once something asks for them.

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
from weft.data.sample import Sample
from weft.kernels.device import is_cpu, is_gpu
from weft.kernels.device_event import sent
from weft.kernels.dropout import row_keys
from weft.model.distill import DistillationRows
from weft.model.heads import LabelledRows
from weft.model.judge import ScoredGroups, find_scored_groups
from weft.model.reference_rows import ReferenceRows
from weft.objectives.distillation import Distillation
from weft.objectives.heads.head_objective import HeadObjective
from weft.objectives.objective import LikelihoodObjective

ADAPTER_WINDOW = 64
"""Rows per adapter product on a CPU; it divides the tile of frozen products. Fixed, so that no row's result depends on
its neighbours; smaller wastes less on short jobs, larger needs fewer calls for long ones."""


@dataclass(frozen=True)
class PlacedSample:
    """A sample with the slot it trains."""

    sample: Sample
    slot: int | None = None
    weight: float = 1.0
    """What a supervised token of weight 1, or a whole group, counts in the gradient: 1 / the global batch's divisor."""
    dropout_key: int | None = None
    step_key: int | None = None
    """A number of its job's seed and step, in training."""
    is_separate: bool = False
    """Whether its slot works on it by itself, as order-independent sums need it; else neighbours of one slot go
    together."""
    position: int = 0
    """Position of its first token; above 0 when earlier tokens are cached."""
    objective: LikelihoodObjective | None = None
    """Who weighs its tokens, where that takes their log-probabilities; its group's samples then follow each other."""
    head: HeadObjective | None = None
    """Who learns from its labels by the head of its slot; its tokens then teach nothing else."""
    reference: ReferenceRows | None = None
    """What the objective compares with; it is known when the microbatch runs."""
    distillation: Distillation | None = None
    """Who learns from its tokens as its reference predicts them; they then teach nothing else."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """What the backbone needs to run one microbatch."""

    device: torch.device
    ids: np.ndarray
    positions: np.ndarray
    keys: np.ndarray
    """int32 dropout keys of the rows."""
    drops: bool
    """Whether dropout applies at all: it does not in evaluation."""
    segments: tuple[Rows, ...]
    segment_slots: tuple[int | None, ...]
    step_keys: tuple[int | None, ...]
    """Of each segment, a number of its job's seed and step; None in evaluation."""
    apart: tuple[bool, ...]
    """Of each segment, whether its slot works on it by itself."""
    is_tiled: bool
    supervised: np.ndarray
    """Rows that predict a supervised token."""
    targets: np.ndarray
    weights: np.ndarray
    counts: tuple[int, ...]
    """Supervised rows of each segment; they lie in segment order in the N-long arrays."""
    importance: np.ndarray | None
    """What each supervised row counts beside others of its job; None where all count the same."""
    scored_groups: tuple[ScoredGroups, ...]
    """Groups whose rows get their weights from log-probabilities."""
    heads: tuple[LabelledRows, ...] = ()
    """Rows that heads of jobs look at; none of these is among the supervised."""
    taught: tuple[DistillationRows, ...] = ()
    """Rows that learn from a teacher; none of these is among the supervised."""
    references: tuple[ReferenceRows | None, ...] = ()
    """Of each segment, what its objective compares with; all of it must be known before the loss is."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Rows that hold a token."""
        return self.segments[-1].end if self.segments else 0

    @functools.cached_property
    def input_ids_T(self) -> torch.Tensor:
        """The tokens."""
        return self._tensor(self.ids)

    @functools.cached_property
    def positions_T(self) -> torch.Tensor:
        """The tokens' places in their samples."""
        return self._tensor(self.positions)

    @functools.cached_property
    def dropout_keys_T(self) -> torch.Tensor | None:
        """The rows' dropout keys, where dropout applies."""
        return self._tensor(self.keys) if self.drops else None

    @functools.cached_property
    def supervised_N(self) -> torch.Tensor:
        """Rows that predict a supervised token."""
        return self._tensor(self.supervised)

    @functools.cached_property
    def targets_N(self) -> torch.Tensor:
        """The tokens they predict."""
        return self._tensor(self.targets)

    @functools.cached_property
    def weights_N(self) -> torch.Tensor:
        """What each counts in its job's loss."""
        return self._tensor(self.weights)

    @functools.cached_property
    def bounds(self) -> torch.Tensor | None:
        """On a GPU: int32, where each segment begins and, last, where the buffer ends; padding is a segment too."""
        return self._tensor(np.array(self._edges, dtype=np.int32)) if is_gpu(self.device) else None

    @property
    def longest(self) -> int:
        """Rows of the longest segment, padding included."""
        return max(end - start for start, end in itertools.pairwise(self._edges))

    @functools.cached_property
    def slots(self) -> tuple[SlotRows, ...]:
        """Neighbouring segments of one slot, together, but for those that go by themselves.

        On a GPU only frozen products are tiled; a slot's adapter products and gradients run over all its rows at once,
        since small products would leave it idle. There, results with other neighbours are equal to rounding.
        """
        on_cpu = is_cpu(self.device)
        window = ADAPTER_WINDOW if self.is_tiled and on_cpu else None
        found = []
        alone = [place if is_separate else -1 for place, is_separate in enumerate(self.apart)]
        owned = zip(zip(self.segment_slots, self.step_keys, alone, strict=True), self.segments, strict=True)
        for (slot, key, _), group in itertools.groupby(owned, key=lambda pair: pair[0]):
            if slot is not None:
                own = [segment for _, segment in group]
                summed = own if on_cpu else [Rows(own[0].start, own[-1].end)]
                begins = [segment.start for segment in own if self.positions[segment.start] == 0]
                found.append(slot_rows(slot, summed, window, self.num_rows, begins, key))
        return tuple(found)

    @property
    def _edges(self) -> list[int]:
        edges = [0, *(segment.end for segment in self.segments)]
        return edges if edges[-1] == self.num_rows else [*edges, self.num_rows]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(array), self.device)


def pack_samples(placed: Sequence[PlacedSample], row_tile: int | None, device: torch.device) -> PackedBatch:
    """One sample after another in one buffer, padded to whole tiles."""
    lengths = [p.sample.length for p in placed]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    num_rows = starts[-1] if row_tile is None else -(-starts[-1] // row_tile) * row_tile
    ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    keys = np.zeros(num_rows, dtype=np.int32)
    rows, targets, weights, counts = [], [], [], []
    is_weighted = any(item.sample.weights is not None for item in placed)
    importance: list[np.ndarray] = []
    for item, start, length in zip(placed, starts, lengths, strict=False):
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
        drops=any(item.dropout_key is not None for item in placed),
        segments=tuple(Rows(start, start + length) for start, length in zip(starts, lengths, strict=False)),
        segment_slots=tuple(item.slot for item in placed),
        step_keys=tuple(item.step_key for item in placed),
        apart=tuple(item.is_separate for item in placed),
        is_tiled=row_tile is not None,
        supervised=np.concatenate(rows).astype(np.int64),
        targets=np.concatenate(targets).astype(np.int64),
        weights=np.concatenate(weights).astype(np.float32),
        counts=tuple(counts),
        importance=np.concatenate(importance) if is_weighted else None,
        scored_groups=find_scored_groups(
            [item.objective for item in placed],
            counts,
            [item.weight for item in placed],
            [math.nan if item.sample.labels is None else item.sample.label for item in placed],
            [item.reference for item in placed],
        ),
        heads=_labelled_rows(placed, starts),
        taught=_distillation_rows(placed, starts),
        references=tuple(item.reference for item in placed),
    )


def _labelled_rows(placed: Sequence[PlacedSample], starts: Sequence[int]) -> tuple[LabelledRows, ...]:
    """The rows that heads look at, job by job."""
    of_slots: dict[int, list[int]] = {}
    for segment, item in enumerate(placed):
        # A stage of a pipeline that holds no part of an adapter has no slot for it; its head is on the last one.
        if item.head is not None and item.slot is not None:
            of_slots.setdefault(item.slot, []).append(segment)
    found = []
    for slot, segments in of_slots.items():
        objective, labels = placed[segments[0]].head, [placed[s].sample.labels for s in segments]
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
                shares=np.repeat(np.array([placed[s].weight for s in segments], dtype=np.float32), counts),
                segments=np.repeat(np.array(segments), counts),
            )
        )
    return tuple(found)


def _distillation_rows(placed: Sequence[PlacedSample], starts: Sequence[int]) -> tuple[DistillationRows, ...]:
    """The rows that learn from teachers, objective by objective, and apart where teachers say more or less of a row."""
    of_objectives: dict[tuple[Distillation, int | None], list[int]] = {}
    for segment, item in enumerate(placed):
        if item.distillation is not None:
            assert item.reference is not None, "a teacher speaks of every sample"
            of_objectives.setdefault((item.distillation, item.reference.num_reference_values), []).append(segment)
    found = []
    for (objective, _), segments in of_objectives.items():
        own = [_predicted(placed[s].sample) for s in segments]
        counts = [len(tokens) for tokens in own]
        teacher = tuple(each for s in segments if (each := placed[s].reference) is not None)
        found.append(
            DistillationRows(
                objective=objective,
                rows=np.concatenate([tokens - 1 + starts[s] for tokens, s in zip(own, segments, strict=True)]),
                targets=np.concatenate(
                    [placed[s].sample.tokens[tokens] for tokens, s in zip(own, segments, strict=True)]
                ).astype(np.int64),
                shares=np.repeat(np.array([placed[s].weight for s in segments], dtype=np.float32), counts),
                segments=np.repeat(np.array(segments), counts),
                teacher=teacher,
            )
        )
    return tuple(found)


def _predicted(sample: Sample) -> np.ndarray:
    """The tokens of a sample that are predicted, and learned from."""
    return np.flatnonzero(sample.supervised[1:]) + 1
