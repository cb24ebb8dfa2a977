"""Turns long series of numbers into short ones that draw the same picture: smoothing, thinning, rates in bins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Points = list[tuple[float, float | None]]
"""(x, y) in order of x; a y of None is a gap."""


def smooth(points: Points, window: int) -> Points:
    """A mean over about `window` points around each, which does not lag behind a falling curve; gaps stay gaps."""
    ahead = _exponential_means([y for _, y in points], window / 2)
    back = _exponential_means([y for _, y in reversed(points)], window / 2)[::-1]
    return [
        (x, None if a is None or b is None else (a + b) / 2) for (x, _), a, b in zip(points, ahead, back, strict=True)
    ]


def thin(points: Points, limit: int) -> Points:
    """At most `limit` points that keep the first, the last, and the lowest and highest of every stretch between."""
    if len(points) <= limit:
        return points
    inner = points[1:-1]
    num_stretches = max((limit - 2) // 2, 1)
    kept = [points[0]]
    for i in range(num_stretches):
        stretch = inner[i * len(inner) // num_stretches : (i + 1) * len(inner) // num_stretches]
        known = [p for p in stretch if p[1] is not None]
        if known:
            ends = {min(known, key=_y), max(known, key=_y)}
            kept += sorted(ends, key=lambda p: p[0])
        elif stretch:
            kept.append(stretch[0])
    return [*kept, points[-1]]


def rate_in_bins(intervals: Iterable[tuple[float, float, float]], end: float, num_bins: int) -> list[float]:
    """Amount per unit of time in equal bins over [0, end]; every (start, stop, amount) is spread over its time."""
    width = end / num_bins
    amounts = [0.0] * num_bins
    for start, stop, amount in intervals:
        first, last = _bin(start, width, num_bins), _bin(stop, width, num_bins)
        if first == last or stop <= start:
            amounts[last] += amount
            continue
        for i in range(first, last + 1):
            overlap = min(stop, (i + 1) * width) - max(start, i * width)
            amounts[i] += amount * max(overlap, 0.0) / (stop - start)
    return [amount / width for amount in amounts]


def in_chunks(num_items: int, num_chunks: int) -> list[slice]:
    """Slices that cut `num_items` into at most `num_chunks` equal runs, none empty."""
    num_chunks = min(num_items, num_chunks)
    return [slice(i * num_items // num_chunks, (i + 1) * num_items // num_chunks) for i in range(num_chunks)]


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    """The values to so many significant digits: enough for a screen, and a fraction of the bytes."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def _exponential_means(values: list[float | None], window: float) -> list[float | None]:
    """The exponential mean up to each value, unbiased from the first one."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    mean = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is None:
            means.append(None)
            continue
        mean = decay * mean + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        means.append(mean / weight)
    return means


def _bin(time: float, width: float, num_bins: int) -> int:
    return min(max(int(time / width), 0), num_bins - 1)


def _y(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0
