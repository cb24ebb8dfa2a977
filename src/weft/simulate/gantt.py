"""A timeline as a picture of characters: one line per stage, time from left to right."""

from __future__ import annotations

from weft.simulate.timeline import COMPUTE, Span, Timeline

IDLE = "·"
MARKS = {"forward": "▒", "backward": "█", "forward_backward": "█", "step": "|"}
"""What fills a character; a span of any other name counts as idle."""


def gantt(timeline: Timeline, width: int = 100, start_s: float = 0.0, end_s: float | None = None) -> str:
    """One line per stage; each character shows what the stage did most of that time."""
    end = timeline.makespan_s if end_s is None else end_s
    tick = (end - start_s) / width
    if tick <= 0:
        return ""
    spent: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in range(timeline.num_stages)]
    for span in timeline.spans:
        if span.lane == COMPUTE and span.end_s > start_s and span.start_s < end:
            _add(spent[span.stage], span, start_s, tick)
    margin = len(f"stage {timeline.num_stages - 1}")
    return "\n".join(
        f"{f'stage {stage}':<{margin}} " + "".join(_character(cell, tick) for cell in cells)
        for stage, cells in enumerate(spent)
    )


def _add(cells: list[dict[str, float]], span: Span, start_s: float, tick: float) -> None:
    first = max(0, int((span.start_s - start_s) / tick))
    last = min(len(cells) - 1, int((span.end_s - start_s) / tick))
    for place in range(first, last + 1):
        left = start_s + place * tick
        overlap = min(span.end_s, left + tick) - max(span.start_s, left)
        if overlap > 0:
            cells[place][span.name] = cells[place].get(span.name, 0.0) + overlap


def _character(cell: dict[str, float], tick: float) -> str:
    """The mark of what took longest, if the stage was not idle for longer still."""
    if not cell or sum(cell.values()) < tick / 2:
        return IDLE
    return MARKS.get(max(sorted(cell), key=lambda name: cell[name]), IDLE)
