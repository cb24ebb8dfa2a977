"""A moving average of a job's weights, which is evaluated and exported instead of the last ones.

    average ← w after the first step;  average ← decay · average + (1 - decay) w after every later one

as torch's `AveragedModel` with `get_ema_avg_fn`. A step that was left out does not count.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.adapters.adapter import Adapter

PREFIX = "ema_"
"""How the names of its tensors begin in a checkpoint."""
COUNT = "ema.count"


class WeightAverage:
    """The average of one adapter's weights, by group, in fp32 where the adapter is."""

    def __init__(self, adapter: Adapter, decay: float) -> None:
        self._decay = decay
        self.count = 0
        """Steps in it."""
        self.params = {name: torch.zeros_like(params) for name, params in adapter.trained().items()}

    def follow(self, adapter: Adapter) -> None:
        """Takes in the weights after a step."""
        for name, params in adapter.trained().items():
            self.params[name].lerp_(params, 1 - self._decay if self.count else 1.0)
        self.count += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name, for a checkpoint."""
        return {f"{PREFIX}{name}": params for name, params in self.params.items()} | {COUNT: torch.tensor(self.count)}

    def take(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Makes what `tensors` hold its own, on a device."""
        self.params = {name: tensors[f"{PREFIX}{name}"].to(device, copy=True) for name in self.params}
        self.count = int(tensors[COUNT])
