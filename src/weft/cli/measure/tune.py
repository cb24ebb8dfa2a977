"""`weft tune`: measures how this GPU wants the kernels launched, and remembers it."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.errors import ConfigError


def tune(
    model: Annotated[str, typer.Option(help="The shape whose widths are used.")] = "llama-3.1-8b",
    rows: Annotated[int, typer.Option(help="Rows of the microbatch.", min=64)] = 8192,
) -> None:
    """Measure this GPU's best launches of the adapter kernels; later runs here use them. No result changes by a bit."""
    from weft.bench.shapes import find_shape

    shape = find_shape(model)
    import torch

    from weft.kernels.device import device_name, has_gpu

    if not has_gpu():
        raise ConfigError("there is no GPU here, and a CPU runs no kernels.", where="weft tune")
    from weft.bench.tune import compile_ahead
    from weft.bench.tune import tune as measure
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
