"""The loss of a microbatch: one weighted pass over its supervised rows, after a first one where weights depend on it.

Rows whose weight is known go through the output head once. An objective that turns log-probabilities into losses first
gets those of its groups' rows; the weights it returns then count in the one weighted pass that all rows share. The
log-probabilities that a reference, the bare backbone or another adapter, gives the same rows are known by then. Each
row's weight comes from its own group, so neighbours keep their bits.

Heads of jobs make logits of labels from the hidden states of some rows. Every head belongs to one job, so only that
job's rows go through it. Logits are made in blocks of fixed size and weights' gradients are added sample by sample in
the job's order, so neither neighbours nor the cut into microbatches change a bit.

Nothing waits for the device. Shape suffixes: T rows of the microbatch, N supervised rows of the microbatch or of some
groups, G groups, M samples of a group, S = G · M; L labels, D width, B rows of a block, U units that a loss is counted
in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from weft.adapters.parts import HeadWeights
from weft.data.samples import Sample
from weft.kernels.device_event import sent
from weft.objectives.heads import HeadLoss, HeadObjective
from weft.objectives.objective import LikelihoodLoss, LikelihoodObjective


class ReferenceRows:
    """Values of the reference for one sample: requested when a microbatch is packed, known when it runs. The sample
    runs through the reference in between, once: the values are the same beside any other samples."""

    def __init__(self, sample: Sample, num_reference_values: int | None = None) -> None:
        """`num_reference_values`: number of the teacher's tokens per supervised token, if the data has them."""
        self.num_reference_values = num_reference_values
        self._sample: Sample | None = sample
        self._values: tuple[torch.Tensor, ...] = ()
        self.is_coming = False

    @property
    def sample(self) -> Sample:
        assert self._sample is not None, "the reference has run"
        return self._sample

    @property
    def is_known(self) -> bool:
        """Whether the reference has run; of several stages, only the last one has its values."""
        return self._sample is None

    @property
    def is_missing(self) -> bool:
        return not (self.is_known or self.is_coming)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Tensors with one row per supervised token of the sample, as the objective needs them."""
        assert self._values, "the sample has not run through the reference"
        return self._values

    @property
    def logprobs_N(self) -> torch.Tensor:
        (logprobs_N,) = self.values
        return logprobs_N

    def learn(self, *values: torch.Tensor) -> None:
        self._values, self._sample = values, None

    def free_values(self) -> None:
        self._values = ()


@dataclass(frozen=True, eq=False)
class ScoredGroups:
    objective: LikelihoodObjective
    learners: tuple[int, ...]
    """Its segments, group by group; the group's loss and metrics are counted to its first."""
    rows: np.ndarray
    references: tuple[ReferenceRows, ...]
    """The reference's values of each segment, if the objective reads them."""
    lengths: np.ndarray
    shares: np.ndarray
    """Weight of each row's group in its job's loss: 1 / divisor of the global batch."""
    labels: np.ndarray | None
    """Label of each sample (S), if the objective reads labels."""

    @property
    def leaders(self) -> tuple[int, ...]:
        return self.learners[:: num_scored(self.objective)]

    @property
    def unlearned(self) -> tuple[int, ...]:
        """Segments without gradients: prompts with another row's answer."""
        size, whole = self.objective.group_size, num_scored(self.objective)
        return tuple(s for index, s in enumerate(self.learners) if index % whole >= size)


@dataclass(frozen=True, eq=False)
class Groups:
    logprobs_N: torch.Tensor
    references_N: torch.Tensor | None
    lengths_S: torch.Tensor
    group_size: int
    labels_GM: torch.Tensor | None = None

    def sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """The sum over each sample's rows (G, M), one row after the other, independent of neighbours."""
        sums_S = torch.segment_reduce(values_N, "sum", lengths=self.lengths_S, unsafe=True, initial=0)
        return sums_S.view(-1, self.group_size)

    def spread(self, values_GM: torch.Tensor) -> torch.Tensor:
        return values_GM.flatten().repeat_interleave(self.lengths_S, output_size=len(self.logprobs_N))


@dataclass(frozen=True, eq=False)
class LossPass:
    results_2N: torch.Tensor
    grad_ND: torch.Tensor | None
    results: tuple[LikelihoodLoss, ...] = ()


class MicrobatchLoss(Protocol):
    def among(self, rows: np.ndarray) -> MicrobatchLoss: ...

    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Unweighted loss and hit of every row (2, N, fp32) and, given weights, the weighted sum's gradient (N, D)."""


def run_loss(
    loss: MicrobatchLoss,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scored_groups: Sequence[ScoredGroups],
) -> LossPass:
    """Losses and hits of all rows and, given weights, the gradient; rows of `scored_groups` by objective."""
    results = []
    for scored in scored_groups:
        groups, rows_N = _groups(scored, loss, hidden_ND, targets_N)
        found = scored.objective.likelihood_loss(groups)
        results.append(found)
        if weights_N is not None:
            shares_N = sent(torch.from_numpy(scored.shares), hidden_ND.device)
            weights_N = weights_N.index_copy(0, rows_N, found.weights_N * shares_N)
    results_2N, grad_ND = loss(hidden_ND, targets_N, weights_N)
    return LossPass(results_2N, grad_ND, tuple(results))


def _groups(
    scored: ScoredGroups, loss: MicrobatchLoss, hidden_ND: torch.Tensor, targets_N: torch.Tensor
) -> tuple[Groups, torch.Tensor]:
    """Log-probabilities of the groups' rows, by a first pass over them only; and the rows' indices."""
    device = hidden_ND.device
    rows_N = sent(torch.from_numpy(scored.rows), device)
    (losses_N, _), _ = loss.among(scored.rows)(hidden_ND[rows_N], targets_N[rows_N])
    references_N = torch.cat([each.logprobs_N for each in scored.references]) if scored.references else None
    lengths_S = sent(torch.from_numpy(scored.lengths), device)
    size = num_scored(scored.objective)
    labels = scored.labels
    labels_GM = None if labels is None else sent(torch.from_numpy(labels), device).view(-1, size)
    return Groups(-losses_N, references_N, lengths_S, size, labels_GM), rows_N


def num_scored(objective: LikelihoodObjective) -> int:
    """M, the number of samples of a group that an objective scores together."""
    return objective.group_size * (1 + objective.reads_mismatch)


def find_scored_groups(
    objectives: Sequence[LikelihoodObjective | None],
    counts: Sequence[int],
    weights: Sequence[float],
    labels: Sequence[float],
    references: Sequence[ReferenceRows | None],
) -> tuple[ScoredGroups, ...]:
    """The groups of segments whose weights depend on log-probabilities. Given per segment: its objective, if it has
    such a one, its number of supervised rows, its weight in the loss, its label, and its reference. A group's segments
    follow each other."""
    found: dict[LikelihoodObjective, list[int]] = {}
    for segment, objective in enumerate(objectives):
        if objective is not None:
            found.setdefault(objective, []).append(segment)
    return tuple(_scored_group(o, segments, counts, weights, labels, references) for o, segments in found.items())


def _scored_group(
    objective: LikelihoodObjective,
    segments: list[int],
    counts: Sequence[int],
    weights: Sequence[float],
    labels: Sequence[float],
    references: Sequence[ReferenceRows | None],
) -> ScoredGroups:
    assert len(segments) % num_scored(objective) == 0, "a group shares a microbatch"
    ends = np.cumsum(counts)
    rows = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    lengths = np.array([counts[s] for s in segments], dtype=np.int64)
    known = tuple(each for s in segments if (each := references[s]) is not None)
    assert len(known) == len(segments) * objective.reads_reference, "a reference speaks of every sample or of none"
    return ScoredGroups(
        objective=objective,
        learners=tuple(segments),
        rows=np.concatenate([rows[s] for s in segments]).astype(np.int64),
        references=known,
        lengths=lengths,
        shares=np.repeat(np.array([weights[s] for s in segments], dtype=np.float32), lengths),
        labels=np.array([labels[s] for s in segments], dtype=np.float32) if objective.reads_labels else None,
    )


BLOCK = 16
"""Rows whose logits are made at once, padded if there are fewer."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    slot: int
    objective: HeadObjective
    rows: np.ndarray
    """Indices among all rows of the microbatch (N)."""
    labels: np.ndarray
    """float32 (N)."""
    shares: np.ndarray
    segments: np.ndarray

    @property
    def unit_segments(self) -> np.ndarray:
        return self.segments[:: self.objective.group_size]

    @property
    def unit_labels(self) -> np.ndarray:
        return self.labels[:: self.objective.group_size]

    @property
    def sample_lengths(self) -> list[int]:
        _, counts = np.unique(self.segments, return_counts=True)
        return [int(count) for count in counts]


@dataclass(frozen=True, eq=False)
class HeadPass:
    labelled: LabelledRows
    results: HeadLoss


@torch.no_grad()
def run_heads(
    hidden_TD: torch.Tensor,
    batch: Sequence[LabelledRows],
    heads: Mapping[int, HeadWeights],
    grad_TD: torch.Tensor | None = None,
) -> list[HeadPass]:
    """The losses of all labelled rows; given the gradient of the hidden states, adds theirs to all gradients."""
    found = []
    for labelled in batch:
        head, device = heads[labelled.slot], hidden_TD.device
        rows_N = sent(torch.from_numpy(labelled.rows), device)
        labels_N = sent(torch.from_numpy(labelled.labels), device)
        hidden_ND = hidden_TD[rows_N]
        logits_NL = _in_blocks(head.logits, hidden_ND)
        results = labelled.objective.head_loss(logits_NL, labels_N)
        found.append(HeadPass(labelled, results))
        if grad_TD is None:
            continue
        slopes_NL = results.slopes_NL * sent(torch.from_numpy(labelled.shares), device)[:, None]
        grad_TD.index_copy_(0, rows_N, _in_blocks(head.input_gradient, slopes_NL).to(grad_TD.dtype))
        lengths = labelled.sample_lengths
        for own_ND, own_NL in zip(hidden_ND.split(lengths), slopes_NL.split(lengths), strict=True):
            head.add_gradients(own_ND, own_NL)
    return found


def _in_blocks(product: Callable[[torch.Tensor], torch.Tensor], values_NX: torch.Tensor) -> torch.Tensor:
    pieces = []
    for first in range(0, len(values_NX), BLOCK):
        piece = values_NX[first : first + BLOCK]
        padded = F.pad(piece, (0, 0, 0, BLOCK - len(piece)))
        pieces.append(product(padded)[: len(piece)])
    return torch.cat(pieces)
