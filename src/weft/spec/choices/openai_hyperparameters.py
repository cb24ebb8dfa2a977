"""OpenAI's hyper-parameters of a fine-tuning job, and what they are in a jobs file.

`auto` is resolved by fixed rules, from nothing but the number of training samples n:

| hyper-parameter | auto |
|---|---|
| n_epochs | 3 for n < 1,000; 2 for n < 10,000; else 1 |
| batch_size | n / 8 rounded down, at least 1 and at most 8; 16 for n >= 10,000 |
| learning_rate_multiplier | 1, of the peak learning rate of the adapter's method, 2e-4 for LoRA |
| beta (method dpo) | 0.1 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.methods.config import MethodConfig
from weft.methods.configs import CONFIGS

BASE_BETA = 0.1


def resolve(hyperparameters: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns n_epochs, batch_size, learning_rate_multiplier and, if it is among them, beta as numbers."""
    auto = {
        "n_epochs": 3 if num_samples < 1_000 else 2 if num_samples < 10_000 else 1,
        "batch_size": min(8, max(1, num_samples // 8)) if num_samples < 10_000 else 16,
        "learning_rate_multiplier": 1.0,
        **({"beta": BASE_BETA} if "beta" in hyperparameters else {}),
    }
    given = {name: value for name, value in hyperparameters.items() if value not in (None, "auto")}
    return auto | given


def training_settings(resolved: Mapping[str, Any], adapter: Any = None) -> dict[str, Any]:
    """What a jobs file says for hyper-parameters that are numbers, beside what it says of the `adapter`, if it does."""
    method = adapter.get("method") if isinstance(adapter, Mapping) else None
    config = CONFIGS.get(method) if isinstance(method, str) else None
    base_rate = (config or MethodConfig).learning_rate
    return {
        "num_train_epochs": resolved["n_epochs"],
        "global_batch_size": resolved["batch_size"],
        "learning_rate": base_rate * resolved["learning_rate_multiplier"],
        **({"beta": resolved["beta"]} if "beta" in resolved else {}),
    }
