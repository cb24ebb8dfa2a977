"""As few microbatches as possible: first fit, best fit, and bins filled to the last token by subset sums.

Problem: min number of bins, subject to Σ_j padded(tokens of job j in the bin) ≤ room. First fit decreasing is the
published greedy. `filled` takes the longest sample left and then the subset that fills the bin best (bit set subset
sums, O(samples² · room / 64) in all): nearly every bin but the last is full to the token, so the last is as empty as
it can be, which is what the published second solver stage is after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan.pack.types import RoundLimits
from weft.plan.types import Segment

Bins = list[list[Segment]]


def _decreasing(segments: Sequence[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda s: (-s.length, s.job, s.step, s.index))


def first_fit(segments: Sequence[Segment], limits: RoundLimits) -> Bins:
    """First fit decreasing: every sample into the first bin that holds it."""
    return _fit(segments, limits, lambda free: free[0])


def best_fit(segments: Sequence[Segment], limits: RoundLimits) -> Bins:
    """Best fit decreasing: every sample into the fullest bin that holds it."""
    return _fit(segments, limits, min)


def _fit(
    segments: Sequence[Segment], limits: RoundLimits, choose: Callable[[list[tuple[int, int]]], tuple[int, int]]
) -> Bins:
    bins: Bins = []
    tokens: list[dict[str, int]] = []
    taken: list[int] = []
    for s in _decreasing(segments):
        fitting = []
        for b, own in enumerate(tokens):
            before = own.get(s.job, 0)
            after = taken[b] + limits.padded(before + s.length) - limits.padded(before)
            if after <= limits.room:
                fitting.append((limits.room - after, b))
        if fitting:
            left, b = choose(fitting)
        else:
            left, b = limits.room - limits.padded(s.length), len(bins)
            bins.append([])
            tokens.append({})
            taken.append(0)
        bins[b].append(s)
        tokens[b][s.job] = tokens[b].get(s.job, 0) + s.length
        taken[b] = limits.room - left
    return bins


def next_fit(segments: Sequence[Segment], limits: RoundLimits) -> Bins:
    """In the given order: a new bin whenever the next sample does not fit."""
    bins: Bins = [[]]
    for s in segments:
        if limits.taken([*bins[-1], s]) > limits.room:
            bins.append([])
        bins[-1].append(s)
    return bins


def filled(segments: Sequence[Segment], limits: RoundLimits) -> Bins:
    """Bin after bin: the longest sample left and the subset of the others that fills it best."""
    left = _decreasing(segments)
    num_jobs = len({s.job for s in segments})
    # A bin pads every job of it by less than the multiple; with that much kept free any subset fits.
    room = limits.room - num_jobs * (limits.padding_multiple - 1)
    bins: Bins = []
    while left:
        longest = left[0]
        chosen = subset([s.length for s in left[1:]], room - longest.length) if longest.length < room else []
        inside = {0, *(i + 1 for i in chosen)}
        bins.append([s for i, s in enumerate(left) if i in inside])
        left = [s for i, s in enumerate(left) if i not in inside]
    return bins


def subset(lengths: list[int], target: int) -> list[int]:
    """Places whose lengths sum to the most that is not above target."""
    mask = (1 << (target + 1)) - 1
    reached = [1]
    for n in lengths:
        reached.append((reached[-1] | reached[-1] << n) & mask)
    total = reached[-1].bit_length() - 1
    chosen = []
    for i in range(len(lengths) - 1, -1, -1):
        if not reached[i] >> total & 1:
            chosen.append(i)
            total -= lengths[i]
    return chosen


def fewest(segments: Sequence[Segment], limits: RoundLimits, bound: int) -> Bins:
    """The best of all heuristics, in order of their cost; stops at the first that meets the bound."""
    best = best_fit(segments, limits)
    for attempt in (first_fit, filled):
        if len(best) <= bound:
            break
        bins = attempt(segments, limits)
        best = bins if len(bins) < len(best) else best
    return best
