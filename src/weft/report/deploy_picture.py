"""A picture of a deployment: every replica as a block, as high as its GPUs and as long as its part of a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError, MissingExtraError, StorageError, install_command
from weft.report.figure import CALM
from weft.store.atomic import storage_errors

if TYPE_CHECKING:
    from weft.plan.simulate.deploy_forecast import DeployForecast

PICTURES = (".svg", ".png")
IDLE = "#e4e6e9"


def check_plot(path: Path) -> None:
    """Refuses a picture that could not be drawn, before anything is measured."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"got {path.name}; the name must end in {' or '.join(PICTURES)}.", where="--plot")
    if not path.parent.is_dir():
        raise StorageError(f"there is no directory {path.parent}.", where=f"--plot {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(f"matplotlib is not installed; {install_command('bench')}.", where="--plot")


def draw_deployment(path: Path, forecast: DeployForecast, title: str) -> None:
    """Draws the replicas of a plan with their work for the first drawn batch."""
    from matplotlib.figure import Figure

    plan, shared = forecast.deployment, forecast.shared
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
    for index, kind in enumerate(kinds):
        axes.barh([0], [0], color=CALM[index % len(CALM)], label=f"{kind.layout} × {plan.replicas.count(kind)}")
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
