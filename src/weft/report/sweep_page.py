"""Shows a sweep: its leaderboard in the terminal, and report.html: which configuration won, by how much, and why.

One self-contained page like that of a run (`weft.report.page`): it opens offline, in light and dark, on a phone too.
All text of users goes through the template's autoescape or, inside the data of the charts, through `json_for_script`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from weft.errors import counted
from weft.report import readable
from weft.report.charts import GREY
from weft.report.page import Cell, Page, PagePart
from weft.report.readable import one_line
from weft.report.run_data import made_with
from weft.report.sweep_board import STATES, Board, BoardTrial, read_board
from weft.report.sweep_charts import draw_sweep_charts
from weft.report.sweep_figure import BEST_COLOUR, STATE_COLOURS, looks
from weft.report.sweep_params import (
    MIN_TRIALS,
    Axis,
    importances,
    num_measured,
    param_names,
    shortened,
    value_label,
    varied_axes,
)
from weft.store.atomic import write_file
from weft.store.wall_clock import TimeSplit

SAVED_COLOUR = "transparent"
ADAPTIVE_NOTE = "The sampler chose later trials by earlier ones, so parameters may have moved together."


def write_sweep_report(
    path: Path, board: Mapping[str, Any], info: Mapping[str, Any], time: Callable[[], TimeSplit] | None = None
) -> None:
    """Writes the page of a leaderboard to `path`, whole or not at all; `info`: the run.json of its trials. `time`:
    called last for the sweep's times, if the leaderboard does not have them yet."""
    path = Path(path)
    write_file(path, render_sweep(read_board(board), info, time, name=path.resolve().parent.name))


def render_sweep(
    board: Board, info: Mapping[str, Any], time: Callable[[], TimeSplit] | None = None, *, name: str
) -> str:
    page = Page("sweep.html", "page.css", "sweep.css", "page.js", "sweep.js")
    charts = draw_sweep_charts(board)
    axes = varied_axes(board)
    board = board if time is None else replace(board, time=time())
    return page.render(
        charts,
        board.time,
        name=name,
        board=board,
        about=[*_about(board, axes), *made_with(info)],
        tiles=_tiles(board),
        best_params=[(key, value_label(value)) for key, value in board.best.params.items()] if board.best else [],
        rows=_rows(board, axes),
        chips=[(f"{num} {state}", STATE_COLOURS.get(state, GREY)) for state, num in board.counts().items()],
        best_colour=BEST_COLOUR,
        outside={name: figure.layout.meta["outside"] for name, figure in charts.items() if figure.layout.meta},
        axes=axes,
        scatters=[(f"scatter_{i}", axis.label) for i, axis in enumerate(axes)],
        importances=importances(board),
        importance_note=_importance_note(board, axes),
        spent=_spent(board),
    )


def _about(board: Board, axes: Sequence[Axis]) -> list[tuple[str, str]]:
    about = [("objective", f"{board.metric}, the {'higher' if board.mode == 'max' else 'lower'} the better")]
    if board.sampler:
        about.append(("sampler", board.sampler))
    varied = {axis.name for axis in axes}
    about.append(("searched", ", ".join(axis.name for axis in axes) or readable.NOTHING))
    fixed = [name for name in param_names(board.trials) if name not in varied]
    return about + [(name, value_label(_first(board, name))) for name in fixed if len(board.trials) > 1]


def _first(board: Board, name: str) -> Any:
    return next(trial.params[name] for trial in board.trials if name in trial.params)


def _tiles(board: Board) -> list[tuple[str, str, str]]:
    counts = board.counts()
    saved = sum(trial.tokens * trial.left_out for trial in board.new_trials)
    tiles = [
        ("trials", str(len(board.trials)), ", ".join(f"{num} {state}" for state, num in counts.items())),
        ("time", readable.duration(board.seconds), ""),
        ("trained", readable.count(board.tokens), "tokens"),
    ]
    if saved:
        share = saved / (saved + board.tokens)
        tiles.append(("saved by stopping", readable.count(saved), f"tokens, {readable.percent(share)} of all"))
    if board.packs_in_words:
        tiles.append(("packs", str(board.num_packs), board.packs_in_words.partition(": ")[2]))
    if board.speed_up is not None:
        alone = readable.duration(board.one_by_one_seconds)
        tiles.append(("speed-up", f"{readable.three_digits(board.speed_up)}x", f"one by one: {alone}"))
    return tiles


def _rows(board: Board, axes: Sequence[Axis]) -> list[dict[str, Any]]:
    drawn = looks(board)
    rows = []
    for number, (trial, look) in enumerate(zip(board.trials, drawn, strict=True), start=1):
        rank = readable.NOTHING if trial.value is None or trial.state == "failed" else str(number)
        row: dict[str, Any] = {"rank": rank, "name": trial.name, "state": trial.state, "reason": trial.reason}
        known = trial.state if trial.state in STATES else "unknown"
        row |= {"colour": look.paint, "is_best": look.is_best, "badge": known, "cells": _cells(board, trial, axes)}
        rows.append(row)
    return rows


def _cells(board: Board, trial: BoardTrial, axes: Sequence[Axis]) -> list[Cell]:
    steps = f"{trial.steps:,}" if trial.total_steps in (0, trial.steps) else f"{trial.steps:,} / {trial.total_steps:,}"
    params = [(axis.label, _param(trial, axis.name), axis.position(trial.params)) for axis in axes]
    return [
        (board.metric, readable.loss(trial.value), trial.value),
        *params,
        ("steps", steps, trial.steps),
        ("tokens", readable.count(trial.tokens), trial.tokens),
        ("time", readable.duration(trial.seconds), trial.seconds),
    ]


def _param(trial: BoardTrial, name: str) -> str:
    return value_label(trial.params[name]) if name in trial.params else readable.NOTHING


def _importance_note(board: Board, axes: Sequence[Axis]) -> str:
    num = num_measured(board)
    if not axes:
        return "All trials have the same parameters."
    if num < MIN_TRIALS:
        return f"Too few trials: {num} with a value; importances need {MIN_TRIALS}."
    note = f"Rests on {num} trials; one that did not reach its end counts with its last value, a failed one not at all."
    return note if board.sampler in ("", "grid", "random") else f"{note} {ADAPTIVE_NOTE}"


def _spent(board: Board) -> list[tuple[str, str, list[PagePart]]]:
    """Tokens and time: title, total, and the parts by state of the trials; what was saved comes last."""
    spent = []
    for title, amount_of, words in (("tokens", "tokens", readable.count), ("time", "seconds", readable.duration)):
        amounts = [(trial.state, float(getattr(trial, amount_of)), trial.left_out) for trial in board.new_trials]
        by_state = {state: sum(amount for s, amount, _ in amounts if s == state) for state in board.counts()}
        saved = sum(amount * left for _, amount, left in amounts)
        total = sum(by_state.values()) + saved
        if not total:
            continue
        parts = [(f"{s}", STATE_COLOURS.get(s, GREY), words(a), 100 * a / total) for s, a in by_state.items() if a]
        if saved:
            parts.append(("saved by stopping", SAVED_COLOUR, words(saved), 100 * saved / total))
        spent.append((title, words(total - saved), parts))
    return spent


STATE_STYLES = {"done": "green", "training": "cyan", "waiting": "dim", "stopped": "yellow", "failed": "red"}
MAX_NAME = 28
MAX_VALUE = 18


def leaderboard_table(board: Mapping[str, Any], limit: int = 20) -> Table:
    """At most `limit` trials, the best first; while trials train, half of the rows are kept for those."""
    known = read_board(board)
    shown = _shown(known, max(limit, 1))
    axes = varied_axes(known)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("trial")
    table.add_column("state", no_wrap=True)
    table.add_column(Text(one_line(known.metric)), justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    # This one and the name may shrink: half a name still identifies the trial, half a number is worthless.
    table.add_column("parameters", overflow="ellipsis", min_width=10)
    for index in shown:
        table.add_row(*_row(known, index, axes))
    hidden = len(known.trials) - len(shown)
    if hidden:
        table.caption = Text(f"… and {counted(hidden, 'more trial')}", style="dim")
    return table


def status_line(board: Mapping[str, Any], remaining_s: float | None = None) -> Text:
    """The sweep in one line: the best so far, trials by state, tokens, time and the remaining budget, speed-up."""
    known = read_board(board)
    parts = []
    if known.best is not None:
        name = readable.cut_middle(one_line(known.best.name), MAX_NAME)
        parts.append(f"best {one_line(known.metric)} {readable.loss(known.best.value)} ({name})")
    parts += [f"{count} {one_line(state)}" for state, count in known.counts().items()]
    parts.append(f"{readable.count(known.tokens)} tokens")
    if known.seconds is not None:
        parts.append(readable.clock(known.seconds))
    if remaining_s is not None:
        parts.append(f"about {readable.clock(remaining_s)} left")
    if known.speed_up is not None:
        parts.append(f"{readable.three_digits(known.speed_up)}x as fast as one by one")
    return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def _shown(board: Board, limit: int) -> list[int]:
    """Indices on the board, in its order: the best, and active trials that would not be among them."""
    indices = range(len(board.trials))
    at_work = [index for index in indices if board.trials[index].state == "training"][: limit // 2]
    others = [index for index in indices if index not in set(at_work)]
    return sorted(at_work + others[: limit - len(at_work)])


def _row(board: Board, index: int, axes: Sequence[Axis]) -> tuple[RenderableType, ...]:
    trial = board.trials[index]
    style = "bold" if trial is board.best else ""
    has_rank = trial.value is not None and trial.state != "failed"
    return (
        str(index + 1) if has_rank else readable.NOTHING,
        readable.NameCell(trial.name, style, widest=MAX_NAME),
        Text(one_line(trial.state), style=STATE_STYLES.get(trial.state, "")),
        Text(readable.loss(trial.value), style=style),
        f"{trial.steps}/{trial.total_steps}" if trial.total_steps else str(trial.steps),
        _shrinking(trial.reason, "red") if trial.state == "failed" else _shrinking(_params(trial, axes)),
    )


def _shrinking(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _params(trial: BoardTrial, axes: Sequence[Axis]) -> str:
    given = [(axis.label, trial.params[axis.name]) for axis in axes if axis.name in trial.params]
    return ", ".join(f"{name} {shortened(value_label(value), MAX_VALUE)}" for name, value in given)
