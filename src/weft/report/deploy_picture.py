"""A picture of a deployment: every replica as a block, as high as its GPUs and as long as its part of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.report.figure import CALM
from weft.store.atomic import storage_errors

if TYPE_CHECKING:
    from weft.plan.simulate.deploy_forecast import DeployForecast

IDLE = "#e4e6e9"


def draw_deployment(path: Path, found: DeployForecast, title: str) -> None:
    """Draws the replicas of a plan and what the first drawn batch keeps them busy with."""
    from matplotlib.figure import Figure

    plan, shared = found.deployment, found.shared
    kinds = list(dict.fromkeys(plan.replicas))
    picture = Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.subplots()
    below = 0
    for kind, seconds in zip(plan.replicas, shared.seconds, strict=True):
        colour = CALM[kinds.index(kind) % len(CALM)]
        middle, height = below + kind.num_gpus / 2, kind.num_gpus * 0.94
        axes.barh(middle, shared.step_s, height=height, color=IDLE)
        axes.barh(middle, seconds, height=height, color=colour)
        below += kind.num_gpus
    for place, kind in enumerate(kinds):
        axes.barh([0], [0], color=CALM[place % len(CALM)], label=f"{kind.layout} × {plan.replicas.count(kind)}")
    axes.barh([0], [0], color=IDLE, label="idle")
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GPUs")
    axes.set_ylim(0, below)
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with storage_errors(path):
        picture.savefig(path, dpi=160)
