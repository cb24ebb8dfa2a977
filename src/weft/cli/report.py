"""`weft report`: the page about a run or a sweep, made again from what its directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.user_path import looked_at, run_location

if TYPE_CHECKING:
    from weft.wall_clock import TimeSplit


def report(
    place: Annotated[
        Any,
        typer.Argument(
            parser=run_location, metavar="PATH", help="A run's or a sweep's directory or URL, such as runs/first."
        ),
    ],
) -> None:
    """Write report.html of a run or a sweep again, also of one that is still going on or was killed."""
    from weft.report import readable

    with looked_at(place) as directory:
        path, layout, split = _write(directory)
        shown = path if isinstance(place, Path) else place.upload(path)
    typer.echo(f"report    {shown}")
    if layout is not None:
        typer.echo(f"layout    {layout}")
    if split is not None:
        typer.echo(f"time      {readable.time_split(split)}")


def _write(directory: Path) -> tuple[Path, str | None, TimeSplit | None]:
    """Writes the page; returns where it is, the layout if it was divided, and where the time went if known."""
    from weft.errors import StorageError
    from weft.report.page import write_report
    from weft.report.read_run import read_info, read_run
    from weft.report.run_data import layout_of
    from weft.report.sweep.board import read_board
    from weft.report.sweep.page import write_sweep_report
    from weft.store.json_text import parse
    from weft.sweeps.record.leaderboard import BOARD, TRIALS

    board = directory / BOARD
    if board.is_file():
        path = directory / "report.html"
        try:
            found = parse(board.read_bytes())
        except ValueError as error:
            raise StorageError(f"is not JSON ({error}).", where=str(board)) from None
        info = read_info(directory / TRIALS)
        write_sweep_report(path, found, info)
        return path, layout_of(info), read_board(found).time
    run = read_run(directory)
    return write_report(directory), run.layout, run.time
