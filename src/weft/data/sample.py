"""One tokenised example: its token ids and which of them count in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids and, for each, whether it counts in the loss; both arrays are read-only."""

    tokens: npt.NDArray[np.int32]
    """The token ids, [L]."""
    supervised: npt.NDArray[np.bool_]
    """Whether token i counts in the loss as a target, predicted from the tokens before it, [L]. Token 0 never does:
    nothing comes before it."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, dtype=np.int32)
        supervised = np.array(self.supervised, dtype=np.bool_)
        assert tokens.ndim == 1, "a sample is one run of tokens"
        assert tokens.shape == supervised.shape, "tokens and supervised must have one length"
        supervised[:1] = False
        tokens.setflags(write=False)
        supervised.setflags(write=False)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "supervised", supervised)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return int(self.tokens.shape[0])

    @property
    def num_supervised(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.supervised.sum())

    def cut(self, length: int) -> Sample:
        """The first `length` tokens."""
        return Sample(self.tokens[:length], self.supervised[:length])
