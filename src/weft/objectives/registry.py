"""The objectives there are, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.objectives.distillation import Distillation, DistillationSettings
from weft.objectives.heads import Classification, ClassSettings, Reward, TokenClassification
from weft.objectives.objective import Objective
from weft.objectives.preference import Cpo, CpoSettings, Dpo, Kto, KtoSettings, Orpo, PreferenceSettings, SimPo
from weft.objectives.supervised import Supervised, Weighted

SUPERVISED = Supervised()
OBJECTIVES: dict[str, Objective] = {
    "dpo": Dpo(),
    "cpo": Cpo(),
    "simpo": SimPo(),
    "orpo": Orpo(),
    "kto": Kto(),
    "reward": Reward(),
    "classification": Classification(),
    "token_classification": TokenClassification(),
    "distillation": Distillation(),
    "weighted": Weighted(),
    "supervised": SUPERVISED,
}
"""Objectives by their value of a job's setting `objective`; `auto` chooses the first one whose columns are found."""


@dataclass(frozen=True)
class ObjectiveSettings(ClassSettings, KtoSettings, CpoSettings, DistillationSettings, PreferenceSettings):
    """The settings of all objectives. Python collects the fields of bases from the last to the first."""


def choose_objective(name: str, rows: Iterable[Mapping[str, Any]]) -> Objective:
    """The objective of that name; for `auto` the first that claims any of the rows."""
    if name != "auto":
        return OBJECTIVES[name]
    seen = list(rows)
    return next((o for o in OBJECTIVES.values() if any(o.claims(values) for values in seen)), SUPERVISED)
