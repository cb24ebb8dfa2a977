"""Writes the report.html of a sweep: which configuration won, by how much, why, and the cost of the search.

One self-contained page like that of a run (`weft.report.page`): it opens offline, in light and dark, on a phone too.
All text of users goes through the template's autoescape or, inside the data of the charts, through `json_for_script`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft import __version__
from weft.report import readable
from weft.report.document import Cell, PagePart, json_for_script, packed_plotly, template_file, templates, time_parts
from weft.report.run_data import made_with
from weft.report.sweep.board import STATES, Board, BoardTrial, read_board
from weft.report.sweep.charts import draw_sweep_charts
from weft.report.sweep.figure import BEST_COLOUR, STATE_COLOURS, looks
from weft.report.sweep.importance import MIN_TRIALS, importances, num_measured
from weft.report.sweep.params import Axis, param_names, value_label, varied_axes
from weft.report.time_charts import GREY
from weft.store.atomic import write_file
from weft.wall_clock import TimeSplit

SAVED_COLOUR = "transparent"
ADAPTIVE_NOTE = "The sampler chose later trials by earlier ones, so parameters may have moved together."


def write_sweep_report(
    path: Path, board: Mapping[str, Any], info: Mapping[str, Any], time: Callable[[], TimeSplit] | None = None
) -> None:
    """Writes the page of a leaderboard to `path`, whole or not at all; `info`: the run.json of its trials.

    `time`: called last for the sweep's times, if the leaderboard does not have them yet.
    """
    path = Path(path)
    write_file(path, render_sweep(read_board(board), info, time, name=path.resolve().parent.name))


def render_sweep(
    board: Board, info: Mapping[str, Any], time: Callable[[], TimeSplit] | None = None, *, name: str
) -> str:
    plotly = packed_plotly()  # a missing plotly is reported before any work
    environment = templates()
    charts = draw_sweep_charts(board)
    axes = varied_axes(board)
    board = board if time is None else replace(board, time=time())
    return environment.get_template("sweep.html").render(
        name=name,
        board=board,
        about=[*_about(board, axes), *made_with(info)],
        tiles=_tiles(board),
        best_params=[(key, value_label(value)) for key, value in board.best.params.items()] if board.best else [],
        rows=_rows(board, axes),
        chips=[(f"{num} {state}", STATE_COLOURS.get(state, GREY)) for state, num in board.counts().items()],
        best_colour=BEST_COLOUR,
        charts=charts,
        figures=json_for_script(charts),
        outside={name: figure.layout.meta["outside"] for name, figure in charts.items() if figure.layout.meta},
        axes=axes,
        scatters=[(f"scatter_{i}", axis.label) for i, axis in enumerate(axes)],
        importances=importances(board),
        importance_note=_importance_note(board, axes),
        spent=_spent(board),
        time_parts=time_parts(board.time),
        readable=readable,
        plotly=plotly,
        style=template_file(environment, "page.css") + template_file(environment, "sweep.css"),
        scripts=[template_file(environment, name) for name in ("page.js", "sweep.js", "plotly.js")],
        version=__version__,
    )


def _about(board: Board, axes: Sequence[Axis]) -> list[tuple[str, str]]:
    """The search space and the shared settings, as label and value."""
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
    """The main numbers: label, value, and a note."""
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
    """Label, text and sort key of one trial's numbers."""
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
    """The basis of the importances, or the reason why there are none."""
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
