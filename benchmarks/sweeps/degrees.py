"""When a pack gains by several GPUs, simulated: sweeps planned with one GPU for each pack, with as many for all packs,
and with a number of its own for each.

All configurations have samples of 512 tokens, in microbatches of 4,096: 8 samples fill one. Stages keep every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.sweeps.parts import QWEN25
from weft.errors import PlanError
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.report.readable import output_console

RANKS = (8, 64)
SAMPLE_TOKENS, LONGEST_TOKENS, CAPACITY = 512, 1024, 4096
NUM_SAMPLES = 4096
"""Trained in an epoch; all times are proportional to it."""
SPACES = {
    "48 of batch 1 to 32": (48, (1, 4, 8, 16, 32), (1,)),
    "12 of batch 8 to 32": (12, (8, 16, 32), (1,)),
    "6 of batch 8 to 32, 1 to 3 epochs": (6, (8, 16, 32), (1, 2, 3)),
    "3 of batch 16": (3, (16,), (1,)),
    "3 of batch 1": (3, (1,), (1,)),
}
"""The number of configurations, their batches and their epochs."""
MACHINES = (("7b", "h100", 8), ("7b", "h200", 4), ("14b", "a100-40", 8), ("32b", "a100-40", 8))


@dataclass(frozen=True)
class Degrees:
    setting: str
    one_s: float | None
    """Makespan with a GPU for each pack; None if a configuration needs more."""
    same_s: float
    """The shortest with the same number of GPUs for all packs."""
    own: SweepPlan
    """With a number of its own for each."""
    tensor_s: float
    """The same with GPUs that share every layer, which changes bits by about 1e-5."""


def space(count: int, batches: Sequence[int], epochs: Sequence[int]) -> list[Configuration]:
    found = []
    for i in range(count):
        batch, num_epochs, rank = batches[i % len(batches)], epochs[i % len(epochs)], RANKS[i % 2]
        steps = num_epochs * NUM_SAMPLES // batch
        found.append(Configuration(f"c{i}", rank, batch, steps, SAMPLE_TOKENS, LONGEST_TOKENS))
    return found


def degrees_of(name: str, size: str, device: str, gpus: int) -> Degrees:
    configurations, shape = space(*SPACES[name]), QWEN25[size]

    def plan(*, in_stages: bool = True, groups: Sequence[int] | None = None) -> SweepPlan | None:
        try:
            return plan_sweep(
                configurations, shape, device, gpus, capacity=CAPACITY, in_stages=in_stages, groups=groups
            )
        except PlanError:
            return None

    alike = [plan(groups=[degree] * (gpus // degree)) for degree in range(1, gpus + 1)]
    own, tensor = plan(), plan(in_stages=False)
    assert own is not None and tensor is not None, "the model fits on all GPUs"
    same_s = min(found.makespan_s for found in alike if found is not None)
    one_s = None if alike[0] is None else alike[0].makespan_s
    return Degrees(f"{size} on {gpus} x {device}: {name}", one_s, same_s, own, tensor.makespan_s)


def degrees() -> None:
    """How many GPUs each pack of a sweep gets, and what that saves, simulated."""
    table = Table("Qwen2.5", "one each", "as many each", "its own", "saves", "degrees of its own", "tensor", box=None)
    for size, device, gpus in MACHINES:
        for name in SPACES:
            found = degrees_of(name, size, device, gpus)
            own_s = found.own.makespan_s
            saved = [None if base is None else 1 - own_s / base for base in (found.one_s, found.same_s)]
            table.add_row(
                found.setting,
                "-" if found.one_s is None else f"{found.one_s:,.0f} s",
                f"{found.same_s:,.0f} s",
                f"{own_s:,.0f} s",
                ", ".join("-" if share is None else f"{share:.0%}" for share in saved),
                "+".join(map(str, sorted((len(gpus) for gpus in {p.gpus for p in found.own.packs}), reverse=True))),
                f"{found.tensor_s:,.0f} s",
            )
    output_console().print(table)
