"""What a reference, the bare backbone or another adapter, says of the supervised rows of one sample."""

from __future__ import annotations

import torch

from weft.data.sample import Sample


class ReferenceRows:
    """The rows of one sample: asked for when a microbatch is packed, known when it runs.

    Somebody runs the sample through the reference in between, if nobody has before: whatever runs beside it, the
    numbers are the same.
    """

    def __init__(self, sample: Sample, num_reference_values: int | None = None) -> None:
        """`num_reference_values`: where the data holds what is said, the tokens that are named in the place of each."""
        self.num_reference_values = num_reference_values
        self._sample: Sample | None = sample
        self._values: tuple[torch.Tensor, ...] = ()
        self.is_coming = False
        """Whether the sample is about to run, so that nobody else need ask."""

    @property
    def sample(self) -> Sample:
        """What has to run."""
        assert self._sample is not None, "nobody needs it any more"
        return self._sample

    @property
    def is_known(self) -> bool:
        """Whether the reference has spoken; what it said, only the last of several stages hears."""
        return self._sample is None

    @property
    def is_missing(self) -> bool:
        """Whether somebody has yet to run the sample through the reference."""
        return not (self.is_known or self.is_coming)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Tensors of as many rows as the sample has supervised tokens: whatever the objective wants to know."""
        assert self._values, "the sample has not run through the reference"
        return self._values

    @property
    def logprobs_N(self) -> torch.Tensor:
        """fp32, of the tokens that the rows predict, where the objective wants to know these."""
        (logprobs_N,) = self.values
        return logprobs_N

    def learn(self, *values: torch.Tensor) -> None:
        """Takes what the reference says."""
        self._values, self._sample = values, None

    def let_go(self) -> None:
        """Drops what was said: who had to know it has read it, and it is not kept."""
        self._values = ()
