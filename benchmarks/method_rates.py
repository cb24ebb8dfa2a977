"""Which learning rate suits which PEFT method on the embedded backbone: where the defaults come from.

    python -m benchmarks method-rates [METHOD ...]

Trains the skill `shout` (180 samples, batches of 8, 40 steps, all else by default) with every method, or those named,
at every rate, all of a method together on one backbone, and prints the loss on 32 samples that were held back. `l0` is
`diff_pruning` with `mask: l0` at its default rate, by `l0_weight`, beside the number of positions that are left.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file

from weft.cli.demo import write_skill
from weft.engine.engine import Engine
from weft.engine.events import EvalDone
from weft.errors import ConfigError
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.store.peft_files import TENSORS_FILE

STEPS, BATCH, NUM_TRAIN, NUM_HELD = 40, 8, 180, 32
RATES: dict[str, tuple[float, ...]] = {
    "lora": (2e-4, 5e-4, 2e-3, 8e-3, 3e-2),
    "dora": (2e-4, 5e-4, 2e-3, 8e-3, 3e-2),
    "vera": (2e-3, 8e-3, 3e-2, 1e-1, 3e-1),
    "bottleneck": (5e-4, 2e-3, 8e-3, 3e-2, 1e-1),
    "bitfit": (3e-3, 8e-3, 3e-2, 1e-1, 3e-1),
    "diff_pruning": (5e-3, 2e-2, 5e-2, 1e-1, 3e-1),
    "ia3": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "prompt_tuning": (3e-2, 1e-1, 3e-1, 1.0, 3.0),
    "prefix_tuning": (3e-2, 1e-1, 3e-1, 1.0, 3.0),
}
L0_WEIGHTS = (1e-7, 1e-6, 1e-5, 1e-4)


def trained(backbone: Backbone, folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The last evaluation loss of each job; all are trained together, and their adapters are in the folder then."""
    engine = Engine(backbone, capacity=1024)
    engine.keep_in(folder)
    files: dict[str, Any] = {"train_data": (str(folder / "train.jsonl"),), "eval_data": (str(folder / "eval.jsonl"),)}
    shared: dict[str, Any] = {"max_steps": STEPS, "eval_steps": STEPS, "global_batch_size": BATCH, "max_length": 128}
    for name, settings in jobs.items():
        engine.submit(JobSpec(name, **files, **shared, **settings))
    losses = dict.fromkeys(jobs, math.nan)
    for event in engine.events():
        if isinstance(event, EvalDone):
            losses[event.job] = event.eval_loss
    return losses


def rates(backbone: Backbone, folder: Path, method: str) -> str:
    """One line of a table: the loss at every rate of a method."""
    jobs = {f"{rate:g}": {"learning_rate": rate, "adapter": AdapterSpec(method=method)} for rate in RATES[method]}
    return "  ".join(f"{rate}: {loss:.3f}" for rate, loss in trained(backbone, folder, jobs).items())


def gates(backbone: Backbone, folder: Path) -> str:
    """The loss for every weight of the penalty, and how many positions are left."""
    specs = {f"{weight:g}": AdapterSpec(method="diff_pruning", mask="l0", l0_weight=weight) for weight in L0_WEIGHTS}
    losses = trained(backbone, folder, {name: {"adapter": spec} for name, spec in specs.items()})
    found = []
    for name, loss in losses.items():
        tensors = load_file(folder / name / "adapter" / TENSORS_FILE)
        left = sum(tensor.numel() for key, tensor in tensors.items() if key.endswith("diff.values"))
        found.append(f"{name}: {loss:.3f} ({left:,})")
    return "  ".join(found)


def method_rates(
    methods: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(RATES)} and l0. Default: all.")] = None,
) -> None:
    """Which learning rate suits which PEFT method."""
    named = methods or [*RATES, "l0"]
    if unknown := [name for name in named if name not in (*RATES, "l0")]:
        raise ConfigError(f"there is no method {unknown[0]!r}; accepted are {', '.join([*RATES, 'l0'])}.")
    backbone = load_backbone(BackboneSpec("tiny", device="cpu"))
    for method in named:
        with tempfile.TemporaryDirectory() as scratch:
            write_skill(Path(scratch), "shout", train=NUM_TRAIN, held=NUM_HELD)
            line = gates(backbone, Path(scratch)) if method == "l0" else rates(backbone, Path(scratch), method)
        print(f"{method:14}{line}", flush=True)
