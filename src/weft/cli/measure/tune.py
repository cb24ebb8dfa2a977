"""`weft tune`: measures how this machine wants to be used, and remembers it: kernels' launches, or a run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.user_path import user_path
from weft.errors import ConfigError

MODEL, ROWS = "llama-3.1-8b", 8192


def tune(
    model: Annotated[str | None, typer.Option(help=f"The shape whose widths are used. [default: {MODEL}]")] = None,
    rows: Annotated[int | None, typer.Option(help=f"Rows of the microbatch. [default: {ROWS}]", min=64)] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="PATH",
            help="Try capacities and layouts of this jobs file instead, by training a few steps of it.",
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="With --jobs: settings to change.")] = None,
    steps: Annotated[
        int, typer.Option(help="With --jobs: global batches of every job in a trial.", min=1, max=1000)
    ] = 4,
    layout: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help="With --jobs: a layout to try, such as stages:2; may be said again."),
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
        from weft.cli.measure.tune_run import tune_run

        tune_run(jobs, overrides or [], steps, layout, again=again)
        return
    if overrides or layout:
        raise ConfigError("settings and layouts are those of a run; give --jobs FILE too.", where="weft tune")
    _tune_kernels(model or MODEL, rows or ROWS)


def _tune_kernels(model: str, rows: int) -> None:
    from weft.plan.cost.published_shapes import find_shape

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
