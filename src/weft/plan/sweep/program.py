"""The mixed-integer program of one pack on one group of GPUs, for PLoRA's F(d, K).

    max  Σ rank_k · h_k − θ · T(h)          T(h) = Σ own_k · h_k + W
    s.t. W ≥ line · M + line' · Σ rows_k · h_k            for both lines of the frozen step
         M ≥ Σ rows_k · h_k / C',   M ≥ s · z_s,   h_k ≤ n_k · z_s for steps_k = s
         Σ adapter_k · h_k + Σ_w wider_w · y_w ≤ room,    h_k ≤ n_k · y_w for every rank class w up to k's own
         h whole, z and y 0 or 1

Columns h | z | y | M | W. M counts in units of the most steps, W of its time, bytes of the room: the solver's
tolerances are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.plan.sweep.cost import Floats, Ints, PackCost


class PackProgram:
    """Packs of the given kinds, at most so many of each, in one way of running."""

    def __init__(self, cost: PackCost, way: int, kinds: Sequence[int], most: Sequence[int]) -> None:
        kind = np.asarray(kinds)
        self.most = np.asarray(most)
        self.ranks = np.array([cost.kinds[k].rank for k in kinds], dtype=float)
        self.rows, self.steps, self.own = cost.rows[kind], cost.steps[kind], cost.own[kind, way]
        self.lines = (cost.small[:, way], cost.large[:, way])
        self.filled = float(cost.filled[way])
        self.lengths = np.unique(self.steps)
        self.unit = float(self.lengths[-1])
        self.unit_s = self.unit * float(self.lines[0][0])
        rooms, adapter = cost.room[:, way], cost.adapter[kind, way]
        wider = np.maximum(rooms[:-1] - rooms[1:], 0.0)
        self.classes = np.arange(1, len(rooms))
        self.width = cost.width[kind]
        self._rows = self._constraints(adapter / rooms[0], wider / rooms[0])

    def seconds(self, counts: Ints) -> float:
        """T(h), without rounding to whole microbatches."""
        rows = float(self.rows @ counts)
        microbatches = max(rows / self.filled, float((self.steps * (counts > 0)).max()))
        frozen = max(float(line[0] * microbatches + line[1] * rows) for line in self.lines)
        return float(self.own @ counts) + frozen

    def rate(self, counts: Ints) -> float:
        """Ranks per second."""
        return float(self.ranks @ counts) / self.seconds(counts)

    def solve(self, theta: float) -> Ints:
        """The counts that maximise ranks less θ times the seconds."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        n, switches = len(self.most), len(self.lengths) + len(self.classes)
        matrix, limits = self._rows
        upper = np.concatenate([self.most, np.ones(switches), [np.inf, np.inf]])
        result = milp(
            np.concatenate([theta * self.own - self.ranks, np.zeros(switches + 1), [theta * self.unit_s]]),
            integrality=np.concatenate([np.ones(n + switches), [0, 0]]),
            bounds=Bounds(np.zeros(len(upper)), upper),
            constraints=LinearConstraint(matrix, -np.inf, limits),
        )
        return np.asarray(np.round(result.x[:n]).astype(np.int64))

    def _constraints(self, adapter: Floats, wider: Floats) -> tuple[Floats, Floats]:
        n, num_z, num_y = len(self.most), len(self.lengths), len(self.classes)
        rows: list[Any] = []

        def row(h: Any = 0.0, z: Any = 0.0, y: Any = 0.0, m: float = 0.0, w: float = 0.0) -> None:
            parts = (np.zeros(n) + h, np.zeros(num_z) + z, np.zeros(num_y) + y, [m, w])
            rows.append(np.concatenate(parts))

        for line in self.lines:
            row(h=line[1] * self.rows / self.unit_s, m=line[0] * self.unit / self.unit_s, w=-1.0)
        row(h=self.rows / self.filled / self.unit, m=-1.0)
        each, z, y = np.eye(n), np.eye(num_z), np.eye(num_y)
        for place, length in enumerate(self.lengths):
            row(z=z[place] * length / self.unit, m=-1.0)
        for i in range(n):
            row(h=each[i], z=-z[np.searchsorted(self.lengths, self.steps[i])] * self.most[i])
            for place in range(self.width[i]):
                row(h=each[i], y=-y[place] * self.most[i])
        row(h=adapter, y=wider)
        limits = np.zeros(len(rows))
        limits[-1] = 1.0
        return np.array(rows), limits
