"""Checks any plan of a sweep independently of the planner."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from weft.plan.sweep import Configuration, SweepPlan


def violations(plan: SweepPlan, configurations: Sequence[Configuration]) -> list[str]:
    """The faults of a plan for these configurations; empty if it is valid.

    Checked: every configuration is in exactly one pack; GPUs exist and are in one pack at a time; memory; microbatches
    hold the longest sample; the makespan is not below the lower bound.
    """
    found = []
    counts = Counter(name for pack in plan.packs for name in pack.configurations)
    wanted = {c.name: c for c in configurations}
    for name in sorted(counts.keys() | wanted.keys()):
        if name not in wanted:
            found.append(f"{name} is in a pack and not in the sweep.")
        elif counts[name] != 1:
            found.append(f"{name} is in {counts[name]} packs; it belongs in one.")
    for number, pack in enumerate(plan.packs, start=1):
        if not pack.configurations or not pack.end_s > pack.start_s >= 0:
            found.append(f"pack {number} is empty or ends before it starts.")
        if len(set(pack.gpus)) != len(pack.gpus) or not set(pack.gpus) <= set(range(plan.num_gpus)) or not pack.gpus:
            found.append(f"pack {number} has the GPUs {pack.gpus}; there are 0 to {plan.num_gpus - 1}.")
        if pack.gpu_bytes > plan.device_bytes:
            found.append(f"pack {number} needs {pack.gpu_bytes:,} bytes of {plan.device_bytes:,}.")
        longest = max((wanted[name].most_tokens for name in pack.configurations if name in wanted), default=0)
        if longest > pack.capacity:
            found.append(f"pack {number} has microbatches of {pack.capacity} rows and a sample of {longest} tokens.")
    found += _overlaps(plan)
    if plan.packs and plan.makespan_s < plan.lower_bound_s * (1 - 1e-9):
        found.append(f"the makespan {plan.makespan_s:g} s is below the lower bound {plan.lower_bound_s:g} s.")
    return found


def _overlaps(plan: SweepPlan) -> list[str]:
    found = []
    for gpu in range(plan.num_gpus):
        mine = sorted((p for p in plan.packs if gpu in p.gpus), key=lambda p: (p.start_s, p.end_s))
        for before, after in itertools.pairwise(mine):
            if after.start_s < before.end_s * (1 - 1e-12):
                found.append(
                    f"GPU {gpu} is in two packs at once: one until {before.end_s:g} s, one from {after.start_s:g} s."
                )
    return found
