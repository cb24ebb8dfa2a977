"""The kinds of optimizers by their names in a job's `optim`."""

from __future__ import annotations

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.adafactor import Adafactor
from weft.engine.execute.optimizers.adamw import AdamW
from weft.engine.execute.optimizers.adamw_8bit import AdamW8bit
from weft.engine.execute.optimizers.lion import Lion
from weft.engine.execute.optimizers.muon import Muon
from weft.engine.execute.optimizers.optimizer import Optimizer
from weft.engine.execute.optimizers.sgd import SGD
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
    """A job's optimizer, which has taken no step."""
    return OPTIMIZER_KINDS[spec.optim](adapter, spec)
