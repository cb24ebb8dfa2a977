"""All that `python -m benchmarks pipeline` measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.pipeline.four_jobs import measure_executed
from benchmarks.pipeline.gpu_costs import measure_free_sums, measure_shards
from benchmarks.pipeline.interleaved import measure_interleaved
from benchmarks.pipeline.killed_layouts import measure_layout_kills
from benchmarks.pipeline.one_gpu import OneDevice, measure_stages
from benchmarks.pipeline.recorded import measure_recorded
from benchmarks.pipeline.seventy import measure_seventy
from benchmarks.report import (
    JsonFile,
    Regimes,
    run_parts,
)
from weft.cli.options import user_path
from weft.errors import ConfigError
from weft.kernels.device import default_device, is_gpu
from weft.plan.cost.profile import Profile, load_profile
from weft.plan.cost.shape import find_shape

TARGETS: Targets = {
    "order_equal": (Kind.SHARE, 1.0),
    "makespan_error": (Kind.WASTE, 0.08),
    "bubble_error": (Kind.WASTE, 0.03),
    "bubble_het4_exec": (Kind.WASTE, 0.06),
    "bubble_het4_exec_every_8": (Kind.WASTE, None),
    "bubble_het4_exec_every_2": (Kind.WASTE, None),
    "bubble_het4_exec_evals_2": (Kind.WASTE, None),
    "bubble_het4_exec_free": (Kind.WASTE, None),
    "bubble_het4_exec_two_every_2": (Kind.WASTE, None),
    "bubble_het4_exec_two_evals_2": (Kind.WASTE, None),
    "sim70b_vs_1f1b": (Kind.SPEEDUP, 1.8),
    "sim70b_vs_mlora": (Kind.SPEEDUP, 1.4),
    **{
        f"sim70b_vs_{peer}_{how}": (Kind.SPEEDUP, None)
        for peer in ("1f1b", "mlora")
        for how in ("rows", "bound", "torch")
    },
    "interleave_nvlink": (Kind.SPEEDUP, None),
    "interleave_hidden_nvlink": (Kind.SHARE, None),
    "interleave_muxtune_nvlink": (Kind.SPEEDUP, None),
    "interleave_pcie": (Kind.SPEEDUP, None),
    "interleave_hidden_pcie": (Kind.SHARE, None),
    "interleave_muxtune_pcie": (Kind.SPEEDUP, None),
    "layout_kills_differ": (Kind.DIFFERENCES, 0.0),
    "layout_kills_hung": (Kind.DIFFERENCES, 0.0),
    "layout_kills_left": (Kind.DIFFERENCES, 0.0),
    "layout_kill_seen_s": (Kind.SECONDS, 5.0),
    "bits_stages": (Kind.DIFFERENCES, 0.0),
    "stage_sum": (Kind.WASTE, 0.03),
    "stage_sim": (Kind.WASTE, 0.05),
    "free_sums_cost": (Kind.OVERHEAD, 0.02),
    "free_sums_bits": (Kind.DIFFERENCES, 0.0),
    "shard_overlap": (Kind.SHARE, None),
    "shard_bits": (Kind.DIFFERENCES, 0.0),
    "shard_gather_gb_s": (Kind.GB_PER_S, None),
}
PROFILE = Path("benchmarks/h200_profile.json")
GPU_REGIMES = ("shard_overlap", "bits_stages", "free_sums_cost")
REGIMES = (
    "order_equal",
    "bubble_het4_exec",
    "sim70b_vs_1f1b",
    "interleave_nvlink",
    "layout_kills_differ",
    *GPU_REGIMES,
)
"""The figures by which parts are chosen."""
SHARDS = "shards on one GPU, gathered from pinned memory"
STREAMS = "8B in stages on one GPU, each a stream of this process"
FREE_SUMS = "8B on one GPU, free sums beside ordered ones"
ON_GPU = frozenset({SHARDS, STREAMS, FREE_SUMS})


def choose_parts(regimes: Sequence[str], profile: Profile | None) -> Parts:
    """The parts that measure those figures, all that can be if there are none; the third by a profile's seconds."""
    device = default_device()
    for name in regimes:
        if name not in REGIMES:
            raise ConfigError(f"got {name!r}; accepted are {', '.join(REGIMES)}.", where="--regime")
        if name in GPU_REGIMES and not is_gpu(device):
            raise ConfigError(f"{name} needs a CUDA GPU and torch sees none.", where="--regime")
    can = [name for name in REGIMES if is_gpu(device) or name not in GPU_REGIMES]
    source = "the hardware table" if profile is None else f"a profile of {profile.setup.model}"
    parts: Parts = {
        "stages on this machine beside the simulator": measure_recorded,
        "four unlike jobs on four stages, simulated": measure_executed,
        f"70B on four H100, simulated by {source}, links assumed": lambda: measure_seventy(profile),
        "two groups on two devices that share every layer, simulated, links assumed": measure_interleaved,
        "24 runs of layouts of which something is killed": measure_layout_kills,
        SHARDS: lambda: measure_shards(device),
        STREAMS: lambda: measure_stages(_eight_billion(device)),
        FREE_SUMS: lambda: measure_free_sums(_eight_billion(device)),
    }
    return {title: part for name, (title, part) in zip(REGIMES, parts.items(), strict=True) if name in (regimes or can)}


def _eight_billion(device: torch.device) -> OneDevice:
    """The 8B shape, with microbatches of which four stages can hold as many as they need."""
    return OneDevice(find_shape("llama-3.1-8b"), torch.bfloat16, device, 4096)


def pipeline(
    regime: Regimes = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="PATH",
            help=f"Simulate 70B with what `weft profile` measured. Default: {PROFILE} if it is there.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Stages of one replica: recorded beside simulated, how long they idle, and 70B beside other schedules."""
    found = profile or (PROFILE if PROFILE.exists() else None)
    parts = choose_parts(regime or [], None if found is None else load_profile(found))
    if not ON_GPU & parts.keys() and not regime:
        typer.echo(f"not measured, since torch sees no GPU: {', '.join(sorted(ON_GPU))}")
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=ON_GPU))
