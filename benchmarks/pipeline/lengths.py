"""Sample lengths like those of the data sets planners are measured on: log-normal, from fixed seeds, no files.

Means: XSum 526 and CNN/DailyMail 947 tokens, WikiSum about 1,800; right-skewed as published (LoRAFusion, figure 13).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.types import Batch, JobQueue

SEED = 20260104


@dataclass(frozen=True)
class LengthMix:
    """Mean and spread (of the logarithm) of each job's lengths."""

    name: str
    jobs: tuple[tuple[float, float], ...]


XSUM, CNN_DM, WIKISUM = (526.0, 0.60), (947.0, 0.45), (1800.0, 0.65)
SHORTEST, LONGEST = 32, 8192

MIXES = (
    LengthMix("xsum", (XSUM,) * 4),
    LengthMix("cnn_dm", (CNN_DM,) * 4),
    LengthMix("wikisum", (WIKISUM,) * 4),
    LengthMix("xsum+wikisum", (XSUM, WIKISUM) * 2),
    LengthMix("xsum+cnn_dm+wikisum+mixed", (XSUM, CNN_DM, WIKISUM, (0.0, 0.0))),
)
"""A mean of 0 draws each sample from one of the three data sets."""


def _draw(rng: np.random.Generator, mean: float, spread: float, num_samples: int) -> list[int]:
    sources = [(mean, spread)] if mean else [XSUM, CNN_DM, WIKISUM]
    drawn = np.stack([rng.lognormal(np.log(m) - s * s / 2, s, num_samples) for m, s in sources])
    chosen = drawn[rng.integers(0, len(sources), num_samples), np.arange(num_samples)]
    lengths: list[int] = np.clip(np.rint(chosen), SHORTEST, LONGEST).astype(int).tolist()
    return lengths


def queues(mix: LengthMix, num_samples: int, global_batch: int, seed: int = SEED) -> list[JobQueue]:
    """Jobs that together have so many samples, in global batches of this size; the last of a job may be smaller."""
    rng = np.random.default_rng(seed)
    own = num_samples // len(mix.jobs)
    made = []
    for i, (mean, spread) in enumerate(mix.jobs):
        lengths = _draw(rng, mean, spread, own)
        batches = tuple(
            Batch(b, 0, tuple(lengths[start : start + global_batch]))
            for b, start in enumerate(range(0, own, global_batch))
        )
        made.append(JobQueue(f"job{i}", batches, True))
    return made
