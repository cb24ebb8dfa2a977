"""What a job's adapter adds to a pass of every microbatch that the job is in.

Measured as adapters run in training, side by side in one microbatch: what several of them take is the sum. So each has
a share of 1 of the device in MuxTune's terms, which profile adapters one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdapterTimes:
    """Of one pass on one stage, the mean over passes and stages."""

    job_s: float
    """However few its tokens: launches, its weights and gradients read and written."""
    rank_token_s: float
    """Per rank and token."""
    ranks: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, job: str, num_tokens: float) -> float:
        """Of one job with so many tokens in the microbatch."""
        return self.job_s + self.rank_token_s * self.ranks.get(job, 0) * num_tokens

    def microbatch_s(self, tokens: Mapping[str, int]) -> float:
        """Of all jobs of a microbatch, with the tokens of each."""
        return sum(self.seconds(job, count) for job, count in tokens.items())
