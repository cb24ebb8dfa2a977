"""Trials of Ray Tune that train together on one shared backbone.

import weft.sweeps.ray_tune
from ray import tune

backbone = weft.sweeps.ray_tune.SharedBackbone("tiny", {"train_data": "train.jsonl", "eval_data": 32, "eval_steps": 10})
tune.Tuner(backbone.trainable, param_space={"learning_rate": tune.loguniform(1e-4, 1e-2)}).fit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.sweeps.ray_tune.shared_backbone import SharedBackbone

__all__ = ["SharedBackbone"]


def __getattr__(name: str) -> Any:
    # The actor's process imports this package before it says how many threads torch takes.
    if name not in __all__:
        raise AttributeError(f"module 'weft.sweeps.ray_tune' has no attribute {name!r}")
    from weft.sweeps.ray_tune.shared_backbone import SharedBackbone

    return SharedBackbone
