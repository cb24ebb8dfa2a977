"""`weft tune` and `weft profile`: measure this machine, for its kernels, for a run's settings, or for planning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import path_option
from weft.errors import ConfigError, ModelError, StorageError
from weft.report import readable
from weft.report.readable import output_console, plain_table
from weft.store.wall_clock import Activity, WallClock, process_start_s

if TYPE_CHECKING:
    from weft.model.backbone import Backbone
    from weft.plan.cost.profile import Profile

MODEL, ROWS = "llama-3.1-8b", 8192


def tune(
    model: Annotated[str | None, typer.Option(help=f"The shape whose widths are used. [default: {MODEL}]")] = None,
    rows: Annotated[int | None, typer.Option(help=f"Rows of the microbatch. [default: {ROWS}]", min=64)] = None,
    jobs: Annotated[
        Path | None, path_option("Try capacities and layouts of this jobs file instead, by training a few steps of it.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="With --jobs: settings to change.")] = None,
    steps: Annotated[
        int, typer.Option(help="With --jobs: global batches of every job in a trial.", min=1, max=1000)
    ] = 4,
    layout: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help="With --jobs: a layout to try, such as stages:2; repeatable."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="With --jobs: measure what was measured before, too.")] = False,
) -> None:
    """Measure this GPU's best launches of the adapter kernels, or with --jobs the best capacity and layout of a run.

    Later runs here use the launches, and no result changes by a bit. Capacity and layout are for you to set.
    """
    if jobs is not None:
        given = "--model" if model is not None else "--rows" if rows is not None else None
        if given is not None:
            raise ConfigError("is about kernels; leave it out with --jobs.", where=given)
        from weft.cli.trials import tune_run

        tune_run(jobs, overrides or [], steps, layout, again=again)
        return
    if overrides or layout:
        raise ConfigError("settings and layouts are those of a run; give --jobs FILE too.", where="weft tune")
    _tune_kernels(model or MODEL, rows or ROWS)


def _tune_kernels(model: str, rows: int) -> None:
    from weft.plan.cost.shape import find_shape

    shape = find_shape(model)
    import torch

    from weft.kernels.device import device_name, has_gpu

    if not has_gpu():
        raise ConfigError("there is no GPU here, and a CPU runs no kernels.", where="weft tune")
    from weft.kernels.tuner import compile_ahead
    from weft.kernels.tuner import tune as measure
    from weft.kernels.tuning import table_of, tuned_tables, tuning_file
    from weft.store.atomic import write_file
    from weft.store.json_text import dump

    device, path = torch.device("cuda"), tuning_file()
    name = device_name(device)
    typer.echo(f"{name}: in use are {table_of(device)[1]}")
    typer.echo("compiling what there is to try")
    compile_ahead(shape, torch.bfloat16, device)
    found = measure(shape, rows, torch.bfloat16, device, typer.echo)
    known = tuned_tables(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, dump({**known, name: {**known.get(name, {}), **found}}))
    typer.echo(f"{len(found)} of the launches are faster now; kept in {path}")


GPU_CAPACITY, CPU_CAPACITY = 8192, 512
TARGET_MAPE = 0.0025
"""Published error of mLoRA's memory model."""
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
    out: Annotated[Path | None, path_option("Write the profile to this JSON file.")] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Largest microbatch in tokens. Default: 8192 on a GPU, 512 on a CPU.")
    ] = None,
    quantize: Annotated[str, typer.Option(help="How frozen weights are stored: none, fp8, int8 or nf4.")] = "none",
    recompute: Annotated[str, typer.Option(help="What backward computes again: none, mlp or full.")] = "none",
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Time every microbatch once.")] = False,
) -> None:
    """Measure this device's time and memory for planning, and check the fits on shapes they have not seen."""
    from weft.engine.execute.profile import check_capacity, measure_profile
    from weft.store.atomic import write_file
    from weft.store.run_dir import RunDirectory

    wall = WallClock(process_start_s())
    if out is not None:
        if not out.parent.is_dir():
            raise StorageError(f"there is no directory {out.parent}.", where=f"--out {out}")
        # Before minutes of measuring.
        RunDirectory.check_writable(out.parent)
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
        report=lambda line: print(f"  {line}", flush=True),
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
    """A backbone to measure: a named shape with random weights, or any `base_model`."""
    import torch

    from weft.kernels.device import has_gpu
    from weft.model.load import Storage, load_backbone, make_backbone
    from weft.plan.cost.shape import EMBEDDED, SHAPES, find_shape
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
    """Tokens of the largest microbatch that a profile measures by default."""
    from weft.kernels.device import is_gpu

    return GPU_CAPACITY if is_gpu(backbone.device) else CPU_CAPACITY


def _show(found: Profile) -> None:
    table = plain_table("", "mean error", "95 % error", left=("",))
    for name, error in found.errors.items():
        table.add_row(NAMES[name], f"{error.mape:.2%}", f"{error.p95:.2%}")
    console = output_console()
    console.print()
    console.print(table)
    mape = found.errors["peak_bytes"].mape
    count = found.errors["peak_bytes"].count
    result = "met" if mape <= TARGET_MAPE else "NOT met"
    print(f"memory_mape = {mape:.3%} on {count} shapes that were not fitted (target ≤ {TARGET_MAPE:.2%}, {result})")
