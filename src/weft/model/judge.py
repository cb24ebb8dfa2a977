"""The loss of a microbatch: one weighted pass over its supervised rows, after a first one where weights depend on it.

Rows whose weight is known go through the output head once. An objective that judges log-probabilities first gets those
of its groups' rows; the weights it returns then count in the one weighted pass that all rows share. What a reference
says of the same rows is known by then. Nothing waits for the device, and each row's weight comes from its own group, so
neighbours keep their bits.
Shape suffixes: N supervised rows of the microbatch or of some groups, G groups, M samples of a group, S = G · M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.kernels.device_event import sent
from weft.model.reference_rows import ReferenceRows
from weft.objectives.objective import Judged, LikelihoodObjective


@dataclass(frozen=True, eq=False)
class ScoredGroups:
    """The groups of one objective in a microbatch."""

    objective: LikelihoodObjective
    learners: tuple[int, ...]
    """Its segments, group by group; the group's loss and metrics are counted to its first."""
    rows: np.ndarray
    """Their supervised rows, among all of the microbatch; group by group."""
    references: tuple[ReferenceRows, ...]
    """What the reference says of each segment's rows, where the objective reads it."""
    lengths: np.ndarray
    """Supervised rows of each sample (S)."""
    shares: np.ndarray
    """What each row's group counts in its job's loss: 1 / divisor of the global batch."""
    labels: np.ndarray | None
    """What each sample is labelled as (S), where the objective reads labels."""

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first segment of each group."""
        return self.learners[:: num_scored(self.objective)]

    @property
    def unlearned(self) -> tuple[int, ...]:
        """Segments that teach nothing: prompts with another row's answer."""
        size, whole = self.objective.group_size, num_scored(self.objective)
        return tuple(s for place, s in enumerate(self.learners) if place % whole >= size)


@dataclass(frozen=True, eq=False)
class Groups:
    """`GroupRows` of one judgement."""

    logprobs_N: torch.Tensor
    references_N: torch.Tensor | None
    lengths_S: torch.Tensor
    group_size: int
    """M."""
    labels_GM: torch.Tensor | None = None

    def sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """The sum over each sample's rows (G, M): one after the other, whatever lies beside them."""
        sums_S = torch.segment_reduce(values_N, "sum", lengths=self.lengths_S, unsafe=True, initial=0)
        return sums_S.view(-1, self.group_size)

    def spread(self, values_GM: torch.Tensor) -> torch.Tensor:
        """Every sample's value on each of its rows (N)."""
        return values_GM.flatten().repeat_interleave(self.lengths_S, output_size=len(self.logprobs_N))


@dataclass(frozen=True, eq=False)
class LossPass:
    """What one pass over the supervised rows of a microbatch found."""

    results_2N: torch.Tensor
    """Losses and hits."""
    grad_ND: torch.Tensor | None
    judged: tuple[Judged, ...] = ()
    """Of each judgement of the batch."""


class MicrobatchLoss(Protocol):
    """The cross entropy of a microbatch's supervised rows."""

    def among(self, rows: np.ndarray) -> MicrobatchLoss:
        """The loss of some of the rows."""
        ...

    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Unweighted loss and hit of every row (2, N, fp32) and, given weights, the weighted sum's gradient (N, D)."""
        ...


def run_loss(
    loss: MicrobatchLoss,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scored_groups: Sequence[ScoredGroups],
) -> LossPass:
    """Losses and hits of all rows and, given weights, the gradient; judged rows get theirs from their objective."""
    judged = []
    for judgement in scored_groups:
        groups, rows_N = _groups(judgement, loss, hidden_ND, targets_N)
        found = judgement.objective.judge(groups)
        judged.append(found)
        if weights_N is not None:
            shares_N = sent(torch.from_numpy(judgement.shares), hidden_ND.device)
            weights_N = weights_N.index_copy(0, rows_N, found.weights_N * shares_N)
    results_2N, grad_ND = loss(hidden_ND, targets_N, weights_N)
    return LossPass(results_2N, grad_ND, tuple(judged))


def _groups(
    judgement: ScoredGroups, loss: MicrobatchLoss, hidden_ND: torch.Tensor, targets_N: torch.Tensor
) -> tuple[Groups, torch.Tensor]:
    """Log-probabilities of the groups' rows, by a first pass over them only; and which rows learn."""
    device = hidden_ND.device
    rows_N = sent(torch.from_numpy(judgement.rows), device)
    (losses_N, _), _ = loss.among(judgement.rows)(hidden_ND[rows_N], targets_N[rows_N])
    references_N = torch.cat([each.logprobs_N for each in judgement.references]) if judgement.references else None
    lengths_S = sent(torch.from_numpy(judgement.lengths), device)
    size = num_scored(judgement.objective)
    labels = judgement.labels
    labels_GM = None if labels is None else sent(torch.from_numpy(labels), device).view(-1, size)
    return Groups(-losses_N, references_N, lengths_S, size, labels_GM), rows_N


def num_scored(objective: LikelihoodObjective) -> int:
    """Samples of a group that an objective judges together: M."""
    return objective.group_size * (1 + objective.reads_mismatch)


def find_scored_groups(
    objectives: Sequence[LikelihoodObjective | None],
    counts: Sequence[int],
    weights: Sequence[float],
    labels: Sequence[float],
    references: Sequence[ReferenceRows | None],
) -> tuple[ScoredGroups, ...]:
    """The groups of segments whose weights depend on log-probabilities.

    Given per segment: its objective, if it has such a one, its supervised rows, its share of the loss, its label, and
    what a reference says of it. A group's segments follow each other.
    """
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
