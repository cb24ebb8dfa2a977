"""`weft cache`: what prepared data is kept on this machine, and how to be rid of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from weft.report.readable import output_console

if TYPE_CHECKING:
    from weft.data.prepared.cache import PreparedCache

cache = typer.Typer(help="Prepared data that is kept for the next run.", rich_markup_mode=None)
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@cache.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Show what is kept: of which files, how large, used when."""
    if context.invoked_subcommand is not None:
        return
    kept = _open()
    if kept is None:
        return
    entries = kept.entries()
    total = sum(entry.num_bytes for entry in entries)
    typer.echo(f"{kept.root}: {_counted(len(entries))}, {_size(total)} of at most {_size(kept.limit_bytes)}")
    if not entries:
        return
    table = Table(box=None, pad_edge=False)
    for title in ("sources", "samples", "size", "used", "key"):
        table.add_column(title, justify="left" if title in ("sources", "key") else "right", overflow="fold")
    now = time.time()
    for entry in entries:
        row = (f"{entry.num_samples:,}", _size(entry.num_bytes), f"{_age(now - entry.used)} ago", entry.key[:12])
        table.add_row(", ".join(entry.sources), *row)
    output_console(markup=False).print(table, highlight=False)


@cache.command()
def clear() -> None:
    """Remove all of it; runs that use it go on."""
    kept = _open()
    if kept is not None:
        typer.echo(f"removed {_counted(kept.clear())} from {kept.root}")


def _open() -> PreparedCache | None:
    from weft.data.prepared.cache import CACHE_VARIABLE, default_cache

    kept = default_cache()
    if kept is None:
        typer.echo(f"{CACHE_VARIABLE} is off: nothing is kept")
    return kept


def _counted(number: int) -> str:
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


def _size(num_bytes: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= unit), (1e3, "kB"))
    return f"{num_bytes / unit:,.1f} {name}"


def _age(seconds: float) -> str:
    return next((f"{seconds // unit:,.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")
