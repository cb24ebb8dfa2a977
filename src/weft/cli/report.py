"""`weft report`: the page about a run or a sweep, made again from what its directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.user_path import user_path


def report(
    directory: Annotated[
        Path,
        typer.Argument(parser=user_path, metavar="PATH", help="A run's or a sweep's directory, such as runs/first."),
    ],
) -> None:
    """Write report.html of a run or a sweep again, also of one that is still going on or was killed."""
    from weft.errors import StorageError
    from weft.report import readable
    from weft.report.page import write_report
    from weft.report.run_data import read_run
    from weft.report.sweep.board import read_board
    from weft.report.sweep.page import write_sweep_report
    from weft.store.json_text import parse
    from weft.sweeps.record.leaderboard import BOARD

    board = directory / BOARD
    if board.is_file():
        path = directory / "report.html"
        try:
            found = parse(board.read_bytes())
        except ValueError as error:
            raise StorageError(f"is not JSON ({error}).", where=str(board)) from None
        write_sweep_report(path, found)
        split = read_board(found).time
    else:
        path = write_report(directory)
        split = read_run(directory).time
    typer.echo(f"report    {path}")
    if split is not None:
        typer.echo(f"time      {readable.time_split(split)}")
