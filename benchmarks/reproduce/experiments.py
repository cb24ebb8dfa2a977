"""What an experiment of a paper is, and how its figures are compared with ours.

A result follows from the numbers alone: *reproduced* within the row's tolerance, *exceeded* beyond it on the better
side, *not reproduced* on the other. Rows without a published number are shown for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.figures import Kind

Values = Mapping[str, float]


class Source(StrEnum):
    MEASURED = "measured"
    SIMULATED = "simulated"
    FITTED = "fitted"
    """Simulated, with numbers chosen to agree with the paper."""


@dataclass(frozen=True)
class Row:
    what: str
    key: str
    """Of the measured values."""
    kind: Kind
    published: float | None = None
    source: Source = Source.SIMULATED
    tolerance: float = 0.1
    """Relative difference within which the paper's figure counts as reproduced."""
    note: str = ""
    """Why ours differs, or what else decides it."""

    def result(self, value: float) -> str:
        if self.published is None:
            return ""
        if abs(value - self.published) <= self.tolerance * abs(self.published):
            return "reproduced"
        is_better = (value < self.published) == self.kind.less_is_better
        return "exceeded" if is_better else "not reproduced"


@dataclass(frozen=True)
class Experiment:
    name: str
    """As the paper numbers it, such as figure-4."""
    title: str
    measure: Callable[[], Values]
    rows: tuple[Row, ...]
    needs_gpu: bool = False


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    experiments: tuple[Experiment, ...]
    left_out: str
    """Experiments that there is no command for yet, as a sentence."""

    def chosen(self, names: Sequence[str]) -> list[Experiment]:
        """KeyError with the first name that there is no experiment of."""
        known = {experiment.name: experiment for experiment in self.experiments}
        return [known[name] for name in names] or list(self.experiments)


def page_of(papers: Sequence[Paper], recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of all papers as Markdown; `recorded`: the JSON file of each, by its name."""
    lines = [
        "# Reproduction",
        "",
        "The experiments of the five papers that Weft unites, each a command: `python -m benchmarks reproduce PAPER",
        "[EXPERIMENT…]`. *Simulated* figures come from Weft's planners on a cost model; *fitted* ones also have",
        "numbers chosen to agree with the paper. Results follow from the numbers: within the tolerance of a row (a",
        "tenth, where its note names no other), better, or worse.",
        "",
        "This page is generated: `python -m benchmarks reproduce --page docs/reproduction.md`.",
    ]
    for paper in papers:
        values = recorded.get(paper.name)
        if values is None:
            continue
        machine = values["machine"]
        lines += ["", f"## {paper.title}", ""]
        lines += [f"`python -m benchmarks reproduce {paper.name}`, {machine['device']}, {machine['date']}.", ""]
        lines += ["| experiment | figure | paper | Weft | how | result |", "|---|---|---|---|---|---|"]
        notes = []
        for experiment in paper.experiments:
            title = f"{experiment.name}: {experiment.title}"
            for row in experiment.rows:
                published = "" if row.published is None else row.kind.shown(row.published)
                found = values.get(row.key)
                shown = ("not recorded yet", row.source, "")
                if found is not None:
                    shown = (row.kind.shown(found), row.source, row.result(found))
                cells = (title, row.what, published, *shown)
                lines.append(f"| {' | '.join(cells)} |")
                title = ""
                if row.note:
                    notes.append(f"- {experiment.name}, {row.what}: {row.note}")
        lines += ["", *notes] if notes else []
        lines += ["", f"Not there yet: {paper.left_out}"]
    return "\n".join(lines) + "\n"
