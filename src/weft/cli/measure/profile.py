"""`weft profile`: measures this device, for planning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from weft.cli.user_path import user_path
from weft.errors import ModelError, StorageError
from weft.report import readable
from weft.report.readable import output_console
from weft.wall_clock import Activity, WallClock, process_start_s

if TYPE_CHECKING:
    from weft.model.backbone import Backbone
    from weft.plan.cost.profile import Profile

GPU_CAPACITY, CPU_CAPACITY = 8192, 512
TARGET_MAPE = 0.0025
"""mLoRA's published error of its memory model."""
NAMES = {
    "forward_s": "forward",
    "backward_s": "backward",
    "step_s": "optimizers",
    "peak_bytes": "memory of tensors",
    "reserved_bytes": "memory taken for them",
}


def profile(
    model: Annotated[
        str, typer.Option(help="tiny (embedded), a named shape with random weights, a model directory or a Hub name.")
    ] = "tiny",
    out: Annotated[
        Path | None, typer.Option(parser=user_path, metavar="PATH", help="Write the profile to this JSON file.")
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Largest microbatch in tokens. Default: 8192 on a GPU, 512 on a CPU.")
    ] = None,
    quantize: Annotated[str, typer.Option(help="How frozen weights are stored: none, fp8, int8 or nf4.")] = "none",
    recompute: Annotated[str, typer.Option(help="What is made again on the way back: none, mlp or full.")] = "none",
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Time every microbatch once.")] = False,
) -> None:
    """Measure this device's time and memory for planning, and check the fits on shapes they have not seen."""
    from weft.engine.execute.profile import check_capacity, measure_profile
    from weft.store.atomic import write_file

    wall = WallClock(process_start_s())
    if out is not None and not out.parent.is_dir():
        raise StorageError(f"there is no directory {out.parent}.", where=f"--out {out}")
    if capacity is not None:
        check_capacity(capacity)
    backbone = open_backbone(model, quantize, recompute, kernels)
    wall.add_start(Activity.LOADING)
    print(f"{backbone.name}  kernels {backbone.kernels}", flush=True)
    begun_s = time.perf_counter()
    found = measure_profile(
        backbone,
        capacity=capacity or default_capacity(backbone),
        recompute=recompute,
        repeats=1 if quick else 3,
        say=lambda line: print(f"  {line}", flush=True),
    )
    ended_s, compiled_s = time.perf_counter(), backbone.compiling_s
    wall.add(Activity.COMPILING, compiled_s, begun_s + compiled_s)
    wall.add(Activity.COMPUTING, ended_s - begun_s - compiled_s, ended_s)
    _show(found)
    if out is not None:
        write_file(out, found.to_json())
        print(f"wrote {out}")
    print(f"time      {readable.time_split(wall.split())}")


def open_backbone(model: str, quantize: str = "none", recompute: str = "none", kernels: str = "auto") -> Backbone:
    """A backbone to measure: a named shape with random weights, or whatever `base_model` may be."""
    import torch

    from weft.kernels.device import has_gpu
    from weft.model.load import load_backbone
    from weft.model.random_model import Storage, make_backbone
    from weft.plan.cost.published_shapes import EMBEDDED, SHAPES, find_shape
    from weft.spec import BackboneSpec

    spec = BackboneSpec(model, quantize=quantize, kernels=kernels, recompute=recompute)
    if model == EMBEDDED or model not in SHAPES:
        return load_backbone(spec)
    if not has_gpu():
        raise ModelError(
            f"the shape {model} is measured on a CUDA GPU, and none is used; tiny and model directories run anywhere.",
            where="--model",
        )
    storage = Storage(quantize, spec.recompute)  # type: ignore[arg-type]
    return make_backbone(find_shape(model), storage, torch.bfloat16, torch.device("cuda", 0), kernels)


def default_capacity(backbone: Backbone) -> int:
    """The largest microbatch a profile measures unless told otherwise."""
    from weft.kernels.device import is_gpu

    return GPU_CAPACITY if is_gpu(backbone.device) else CPU_CAPACITY


def _show(found: Profile) -> None:
    table = Table(box=None, pad_edge=False)
    for column, side in (("", "left"), ("mean error", "right"), ("95 % error", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for name, error in found.errors.items():
        table.add_row(NAMES[name], f"{error.mape:.2%}", f"{error.p95:.2%}")
    console = output_console()
    console.print()
    console.print(table)
    mape = found.errors["peak_bytes"].mape
    count = found.errors["peak_bytes"].count
    verdict = "met" if mape <= TARGET_MAPE else "NOT met"
    print(f"memory_mape = {mape:.3%} on {count} shapes that were not fitted (target ≤ {TARGET_MAPE:.2%}, {verdict})")
