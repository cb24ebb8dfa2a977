"""Formats numbers and texts for people: durations, token counts, rates, losses, learning rates."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weft.errors import counted, size
from weft.objectives.objective import is_share
from weft.store.wall_clock import Activity, TimeSplit

if TYPE_CHECKING:
    from weft.report.run_data import RunData

NOTHING = "–"
"""Shown where there is no number."""
UNIT_SIGNS = {"seconds": "s", "minutes": "min", "hours": "h"}
MOST_REPLICAS = 8
"""Replicas whose numbers are on a line; the report has all."""
NARROWEST = 8
"""Characters of a name in a table, however narrow the terminal."""


def duration(seconds: float | None) -> str:
    """`48 s`, `12 min 05 s`, `3 h 07 min`."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def clock(seconds: float | None) -> str:
    """`0:48`, `12:05`, `3:07:10`: a duration for narrow columns."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def count(value: float | None) -> str:
    """`950`, `12.4 k`, `3.10 M`."""
    if value is None:
        return NOTHING
    for large, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,999 would round to 1000 k; from 999.95 on the next unit takes over.
        if value >= large * 0.99995 and value >= 1000:
            return f"{three_digits(value / large)} {unit}"
    return f"{value:.0f}"


def expert_costs(jobs: Iterable[tuple[str, str, int, int, int | None]]) -> list[str]:
    """A line for each choice of routed experts, from jobs by name: how they train experts, parameters, bytes, and how
    many such jobs fit if that is known."""
    names: dict[str, list[str]] = {}
    for name, experts, num_parameters, num_bytes, num_fit in jobs:
        fit = "" if num_fit is None else f", {num_fit:,} such {'job fits' if num_fit == 1 else 'jobs fit'}"
        text = f"{experts}: {count(num_parameters)} parameters, {size(num_bytes)} with gradients and optimizer{fit}"
        names.setdefault(text, []).append(name)
    return [f"experts   {', '.join(own)}: {text}" for text, own in names.items()]


def three_digits(value: float) -> str:
    """`3.10`, `12.4`, `950`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second, without the unit: `87.3`, `1,234`."""
    if tokens_per_s is None:
        return NOTHING
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 99.95 else three_digits(tokens_per_s)


def loss(value: float | None) -> str:
    """Four digits after the point while they mean something, scientific beyond."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def learning_rate(value: float | None) -> str:
    """`2e-4`, `1.5e-05` without its needless zeros."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent(fraction: float | None) -> str:
    """`93 %`."""
    return NOTHING if fraction is None else f"{100 * fraction:.0f} %"


def measure(name: str, value: float) -> str:
    """A metric of an objective, by its name: a share as `93.8 %`, anything else like a loss."""
    return f"{100 * value:.1f} %" if is_share(name) else loss(value)


def measures(values: Mapping[str, float]) -> str:
    """`accuracies 93.8 %, margins 1.2041` of rewards/accuracies and rewards/margins."""
    return ", ".join(f"{name.split('/')[-1]} {measure(name, value)}" for name, value in values.items()) or NOTHING


def one_line(text: str) -> str:
    """Text that cannot move the cursor or colour the screen, whatever a data file or an error contains."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def cut_middle(text: str, limit: int) -> str:
    """`a-long-na…-the-tail`: text in at most `limit` characters; names of one family differ at either end."""
    if len(text) <= limit:
        return text
    tail = max(limit - 1, 0) // 2
    return text[: max(limit - 1 - tail, 0)] + "…" + text[len(text) - tail :]


@dataclass(frozen=True)
class NameCell:
    """A name in a table: whole where there is room, else cut in the middle; the table's other columns stay whole."""

    name: str
    style: str = ""
    widest: int = 64

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(cut_middle(one_line(self.name), min(self.widest, options.max_width)), style=self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(len(one_line(self.name)), self.widest)
        return Measurement(min(width, NARROWEST), width).with_maximum(options.max_width)


def time_split(split: TimeSplit) -> str:
    """`28.7 s: 11.2 computing, 6.0 evaluating, 9.0 loading, 2.5 idle`: negligible parts are left out."""
    unit, unit_s = time_unit(split.wall_s)
    parts = [(split.seconds(activity) / unit_s, activity) for activity in Activity]
    text = ", ".join(f"{amount:,.1f} {activity}" for amount, activity in parts if amount >= 0.05)
    return f"{split.wall_s / unit_s:,.1f} {UNIT_SIGNS[unit]}: {text or Activity.IDLE}"


def dispatched(run: RunData) -> str | None:
    """`38 steps of 3 replicas took 0.41 s each, predicted 0.40 s from measured passes; busy 94%, 91%, 89%`."""
    steps, replicas = run.compared_steps, run.replica_means
    if not steps:
        return None
    took_s, predicted_s = (fmean(getattr(step, name) for step in steps) for name in ("seconds", "predicted_s"))
    busy = ", ".join(percent(replica.busy) for replica in replicas[:MOST_REPLICAS])
    more = ", …" if len(replicas) > MOST_REPLICAS else ""
    return (
        f"{counted(len(steps), 'step')} of {counted(len(replicas), 'replica')} took {took_s:.3g} s each, predicted "
        f"{predicted_s:.3g} s {run.predicted_from}; busy {busy}{more}"
    )


def time_unit(end_s: float) -> tuple[str, float]:
    """The unit for an axis up to `end_s`, and its seconds."""
    if end_s > 3 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if end_s > 300 else ("seconds", 1.0)


def plain_table(*columns: str, left: Container[str] = ()) -> Table:
    """A table without lines whose cells stay on one line; columns in `left` are aligned left and may be cut."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in left)
    return table


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text as it is, without markup, colours of numbers or line breaks at the width of the terminal."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


PIPE_COLUMNS = 10_000
"""Wider than any line: a reader of a pipe needs every line and every cell whole."""


def output_console(*, markup: bool = True) -> Console:
    """The console on stdout; into a pipe or a file it neither wraps nor cuts, unless COLUMNS sets a width. Without
    `markup`, brackets in a text are brackets."""
    console = Console(markup=markup)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console
