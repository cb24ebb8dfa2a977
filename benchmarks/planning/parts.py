"""All figures of planning: packing, pipelines, fusion, models, replay. Nothing here needs a GPU or a data file."""

from __future__ import annotations

import typer

from benchmarks.commands import JsonFile
from benchmarks.deploy.fusing import measure_fuse
from benchmarks.figures import Kind, Parts, Targets
from benchmarks.output import run_parts
from benchmarks.planning.cluster import measure_replay, plan_share
from benchmarks.planning.cost import measure_cost
from benchmarks.planning.pack import measure_pack
from benchmarks.planning.pipeline import measure_pipeline, measure_settings, summary

TARGETS: Targets = {
    "pack_s_25600": (Kind.SECONDS, 5.0),
    "pack_over_lower_bound": (Kind.WASTE, 0.01),
    "pack_proven_share": (Kind.SHARE, 0.99),
    "bubble_het4": (Kind.WASTE, 0.06),
    "bubble_1f1b": (Kind.WASTE, None),
    "bubble_mlora": (Kind.WASTE, None),
    "bubble_lorafusion": (Kind.WASTE, None),
    "bubble_worst20": (Kind.WASTE, 0.09),
    "bubble_mean20": (Kind.WASTE, 0.04),
    "htask64_s": (Kind.SECONDS, 0.5),
    "plan_share_of_step": (Kind.WASTE, 0.01),
    "memory_mape": (Kind.WASTE, 0.0025),
    "replay_week_s": (Kind.SECONDS, 30.0),
    "replay_weft_over_peft": (Kind.SPEEDUP, None),
    "replay_weft_over_peft_fast": (Kind.SPEEDUP, None),
    "replay_weft_over_mlora": (Kind.SPEEDUP, None),
    "replay_weft_over_lobra": (Kind.SPEEDUP, None),
}
PARTS: Parts = {
    "packing": measure_pack,
    "pipelines": measure_pipeline,
    "20 settings": lambda: summary(measure_settings()),
    "fusion": measure_fuse,
    "cost models": measure_cost,
    "a cluster's week": measure_replay,
    "planning beside training": plan_share,
}


def planning(json: JsonFile = None) -> None:
    """Packing, pipelines, fusion, cost models and a cluster's week, replayed."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
