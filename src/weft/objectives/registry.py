"""The objectives there are, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.objectives.distillation import Distillation, DistillationSettings
from weft.objectives.heads.classes import Classification, ClassSettings, TokenClassification
from weft.objectives.heads.reward import Reward
from weft.objectives.objective import Objective
from weft.objectives.preference.cpo import Cpo, CpoSettings, Orpo, SimPo
from weft.objectives.preference.dpo import Dpo, PreferenceSettings
from weft.objectives.preference.kto import Kto, KtoSettings
from weft.objectives.supervised import Supervised
from weft.objectives.weighted import Weighted

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
"""By the name that `objective` of a job has; where it is `auto`, the first whose columns are found is chosen."""


@dataclass(frozen=True)
class ObjectiveSettings(ClassSettings, KtoSettings, CpoSettings, DistillationSettings, PreferenceSettings):
    """The settings of all objectives. Python collects the fields of bases from the last to the first."""


def choose_objective(name: str, rows: Iterable[Mapping[str, Any]]) -> Objective:
    """The objective of that name, or for `auto` the first that any of the rows asks for."""
    if name != "auto":
        return OBJECTIVES[name]
    seen = list(rows)
    return next((o for o in OBJECTIVES.values() if any(o.claims(values) for values in seen)), SUPERVISED)
