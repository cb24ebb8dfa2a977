"""Computes how much of the objective each parameter alone explains, and how much of that may be chance.

Trials are sorted by their objective and only their ranks are used, so that one diverged trial does not decide
everything. A parameter divides the n trials into k groups (its choices, or equal parts of its range); its importance is
the share of the variance of the ranks between the groups, corrected for the number of groups:

    eta2 = sum over groups of size * (mean of group - mean)^2  /  sum over trials of (rank - mean)^2
    importance = max(0, 1 - (1 - eta2) * (n - 1) / (n - k))

The same number after shuffling the objectives is what chance alone reaches in one case of twenty. Failed trials have no
objective and do not count; all others count with their last one. Interactions of parameters are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.report.sweep.board import Board
from weft.report.sweep.params import MAX_CHOICES, Axis, number_label, shortened, varied_axes

MIN_TRIALS = 8
"""With fewer, chance explains nearly anything."""
TRIALS_PER_GROUP = 4
MAX_GROUPS = 5
NUM_SHUFFLES = 400
CHANCE = 0.95

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Importance:
    """How much one parameter explains."""

    name: str
    share: float
    """Share of the variance of the trials' ranks, 0 to 1."""
    chance: float
    """Share that shuffled objectives stay below in 95 cases of 100."""
    num_trials: int
    best_group: str
    """Values whose trials did best on average."""

    @property
    def is_clear(self) -> bool:
        return self.share > self.chance


def importances(board: Board) -> list[Importance]:
    """Every parameter with enough trials, the most important first; empty with too few trials."""
    measured = [_importance(board, axis) for axis in varied_axes(board)]
    known = [importance for importance in measured if importance is not None]
    return sorted(known, key=lambda importance: -importance.share)


def num_measured(board: Board) -> int:
    """Trials that count: those with an objective that did not fail."""
    return sum(trial.value is not None and trial.state != "failed" for trial in board.trials)


def _importance(board: Board, axis: Axis) -> Importance | None:
    sign = -1.0 if board.mode == "max" else 1.0
    pairs = [
        (position, sign * trial.value)
        for trial in board.trials
        if trial.value is not None and trial.state != "failed" and (position := axis.position(trial.params)) is not None
    ]
    if len(pairs) < MIN_TRIALS:
        return None
    params = np.array([position for position, _ in pairs])
    order = _order(np.array([value for _, value in pairs]))
    groups, labels = _groups(axis, params)
    if not 1 < len(labels) < len(pairs) or np.ptp(order) == 0:
        return None
    share = _explained(order[None], groups, len(labels))[0]
    chance = np.random.default_rng(0)
    shuffled = np.stack([chance.permutation(order) for _ in range(NUM_SHUFFLES)])
    by_chance = np.quantile(_explained(shuffled, groups, len(labels)), CHANCE)
    means = [order[groups == group].mean() for group in range(len(labels))]
    return Importance(axis.label, float(share), float(by_chance), len(pairs), labels[int(np.argmin(means))])


def _explained(orders: FloatArray, groups: NDArray[np.int64], num_groups: int) -> FloatArray:
    """The corrected share for every row of ranks."""
    n = orders.shape[1]
    membership = np.eye(num_groups)[groups]
    sizes = membership.sum(axis=0)
    centred = orders - orders.mean(axis=1, keepdims=True)
    means = centred @ membership / sizes
    eta2 = (sizes * means**2).sum(axis=1) / (centred**2).sum(axis=1)
    corrected: FloatArray = 1.0 - (1.0 - eta2) * (n - 1) / (n - num_groups)
    return np.maximum(corrected, 0.0)


def _groups(axis: Axis, params: FloatArray) -> tuple[NDArray[np.int64], list[str]]:
    """The group of every trial, and the names of the groups."""
    if axis.kind == "choice":
        used, groups = np.unique(params, return_inverse=True)
        labels = [
            shortened(label) for position, label in zip(_centres(axis), axis.choices, strict=True) if position in used
        ]
        return groups.astype(np.int64), labels
    values, groups = np.unique(params, return_inverse=True)
    if len(values) <= min(MAX_CHOICES, len(params) // 2):
        return groups.astype(np.int64), [number_label(axis.value_at(position), digits=2) for position in values]
    num_groups = min(max(len(params) // TRIALS_PER_GROUP, 2), MAX_GROUPS)
    edges = np.quantile(params, np.linspace(0, 1, num_groups + 1))
    used, groups = np.unique(np.searchsorted(edges[1:-1], params, side="right"), return_inverse=True)
    ranges = [(params[groups == group].min(), params[groups == group].max()) for group in range(len(used))]
    labels = [" to ".join(number_label(axis.value_at(position), digits=2) for position in ends) for ends in ranges]
    return groups.astype(np.int64), labels


def _centres(axis: Axis) -> Sequence[float]:
    return [position for position, _ in axis.ticks()]


def _order(values: FloatArray) -> FloatArray:
    """The rank of every value, from 0 for the smallest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: FloatArray = last - (counts + 1) / 2
    return means[inverse]
