"""Positions the values of a searched parameter on an axis, and estimates how much each parameter mattered.

Choices stand side by side, ranges are linear or logarithmic. One `Axis` serves the parallel coordinates, the scatter
plots, the importance and the sorting of the table, so that a parameter looks the same everywhere.

Importance is how much of the objective a parameter alone explains. Trials are sorted by their objective and only their
ranks are used, so that one diverged trial does not decide everything. A parameter divides the n trials into k groups
(its choices, or equal parts of its range); its importance is the share of the variance of the ranks between the groups,
corrected for the number of groups:

    eta2 = sum over groups of size * (mean of group - mean)^2  /  sum over trials of (rank - mean)^2
    importance = max(0, 1 - (1 - eta2) * (n - 1) / (n - k))

The same number after shuffling the objectives is what chance alone reaches in one case of twenty. Failed trials have no
objective and do not count; all others count with their last one. Interactions of parameters are not detected.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.report import readable
from weft.report.run_data import number
from weft.report.sweep_board import Board, BoardTrial

MAX_CHOICES = 8
"""Numbers with at most this many different values are taken for a list of choices."""
LOG_FROM = 10.0
"""A range whose ends differ by a smaller factor is taken to be linear if its scale is unknown."""
MAX_LABEL = 22


@dataclass(frozen=True)
class Axis:
    name: str
    kind: str
    """`choice`, `linear` or `log`."""
    choices: tuple[str, ...]
    """The labels of a choice, in order; empty for a range."""
    low: float
    high: float
    label: str = ""
    """The last part of the name if it is unique: `r` for `adapter.r`."""

    def position(self, params: Mapping[str, Any]) -> float | None:
        """Position of the value, from 0 to 1; None if the trial has none."""
        if self.name not in params:
            return None
        value = params[self.name]
        if self.kind == "choice":
            label = value_label(value)
            return (self.choices.index(label) + 0.5) / len(self.choices) if label in self.choices else None
        known = number(value)
        if known is None:
            return None
        return (self._scaled(known) - self._scaled(self.low)) / (self._scaled(self.high) - self._scaled(self.low))

    def value_at(self, position: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        scaled = low + position * (high - low)
        return 10.0**scaled if self.kind == "log" else scaled

    def ticks(self) -> list[tuple[float, str]]:
        """Position and label of an axis' ticks: every choice, or five values of a range."""
        if self.kind == "choice":
            return [((i + 0.5) / len(self.choices), shortened(label)) for i, label in enumerate(self.choices)]
        return [(i / 4, number_label(self.value_at(i / 4), digits=2)) for i in range(5)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.kind == "log" else value


def varied_axes(board: Board) -> list[Axis]:
    """One axis for every parameter that differs between trials, in the order of the search space."""
    names = param_names(board.trials)
    ends = Counter(_last_part(name) for name in names)
    axes = [axis for name in names if (axis := _axis(name, board)) is not None]
    labels = [end if ends[end := _last_part(axis.name)] == 1 else axis.name for axis in axes]
    return [dataclasses.replace(axis, label=label) for axis, label in zip(axes, labels, strict=True)]


def param_names(trials: Sequence[BoardTrial]) -> list[str]:
    by_number = sorted(trials, key=lambda trial: trial.number)
    return list(dict.fromkeys(name for trial in by_number for name in trial.params))


def value_label(value: Any) -> str:
    """A parameter's value for people: `2e-4`, `16`, `true`, `q_proj, v_proj`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_label(value)
    if isinstance(value, list | tuple):
        return ", ".join(value_label(item) for item in value)
    return readable.NOTHING if value is None else str(value)


def number_label(value: float, *, digits: int = 4) -> str:
    """`0.05`, `16`, `2.5e-4`."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    # Never a digit before the point lost: 1234 stays 1234 with two digits too.
    plain = f"{value:.{max(digits, len(str(int(abs(value)))))}g}"
    if value == 0 or 1e-2 <= abs(value) < 1e5 or (abs(value) >= 1e-3 and len(plain.lstrip("-")) <= len("0.005")):
        return plain
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def shortened(label: str, limit: int = MAX_LABEL) -> str:
    return label if len(label) <= limit else label[: limit - 1].rstrip(" ,") + "…"


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _axis(name: str, board: Board) -> Axis | None:
    """None if all trials with the parameter agree; a guess if the board does not know the search space."""
    values = [trial.params[name] for trial in board.trials if name in trial.params]
    scale = board.scales.get(name)
    labels = dict.fromkeys(value_label(value) for value in values)
    if len(labels) < 2:
        return None
    numbers = [known for value in values if (known := number(value)) is not None]
    # Drawn from a range, hardly two trials have the same value; a list of choices is met again and again. A few whole
    # numbers are read best as choices, unless distances mean something else than they would show.
    is_drawn = scale == "log" or (len(labels) > 4 and len(labels) > 0.75 * len(values))
    if len(numbers) < len(values) or (len(labels) <= MAX_CHOICES and not is_drawn):
        keyed = {
            value_label(value): (number(value) is None, number(value) or 0.0, value_label(value)) for value in values
        }
        return Axis(name, "choice", tuple(sorted(labels, key=lambda label: keyed[label])), 0.0, 1.0)
    low, high = min(numbers), max(numbers)
    is_log = low > 0 and (scale == "log" if scale else _seems_log(numbers))
    return Axis(name, "log" if is_log else "linear", (), low, high)


def _seems_log(numbers: Sequence[float]) -> bool:
    """True if the middle value is nearer the middle of a logarithmic axis than that of a linear one."""
    low, high, median = min(numbers), max(numbers), statistics.median(numbers)
    if high / low < LOG_FROM:
        return False
    linear = (median - low) / (high - low)
    logarithmic = math.log(median / low) / math.log(high / low)
    return abs(logarithmic - 0.5) < abs(linear - 0.5)


MIN_TRIALS = 8
"""With fewer, chance explains nearly anything."""
TRIALS_PER_GROUP = 4
MAX_GROUPS = 5
NUM_SHUFFLES = 400
CHANCE = 0.95

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Importance:
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
    if axis.kind == "choice":
        used, groups = np.unique(params, return_inverse=True)
        labels = [label for position, label in axis.ticks() if position in used]
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


def _order(values: FloatArray) -> FloatArray:
    """The rank of every value, from 0 for the smallest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: FloatArray = last - (counts + 1) / 2
    return means[inverse]
