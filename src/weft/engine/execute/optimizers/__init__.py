"""Optimizers of jobs, by their names in a job's `optim`."""

from __future__ import annotations

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.adamw import AdamW, AdamW8bit
from weft.engine.execute.optimizers.gated import SGD, Adafactor, Lion, Muon
from weft.engine.execute.optimizers.optimizer import Optimizer
from weft.spec import JobSpec

OPTIMIZER_KINDS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "sgd": SGD,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
}


def optimizer_of(adapter: Adapter, spec: JobSpec) -> Optimizer:
    return OPTIMIZER_KINDS[spec.optim](adapter, spec)
