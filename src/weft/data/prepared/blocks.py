"""Joins the tokens of texts and cuts them in blocks of one length, for continued pre-training on long documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.data.samples import Samples, TokenArrays


class BlockCutter:
    """Takes the tokens of texts in order and returns whole blocks; the rest waits for the next texts."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rest = np.empty(0, np.int32)

    def add(self, tokens: npt.NDArray[np.int32]) -> Samples:
        joined = np.concatenate([self._rest, tokens])
        whole = len(joined) // self._length * self._length
        self._rest = joined[whole:]
        return _blocks(joined[:whole], self._length)

    def finish(self) -> Samples:
        """The last block, which is shorter; none where too little is left to learn from."""
        rest, self._rest = self._rest, np.empty(0, np.int32)
        return _blocks(rest if len(rest) > 1 else rest[:0], max(len(rest), 1))


def _blocks(tokens: npt.NDArray[np.int32], length: int) -> Samples:
    """Consecutive samples of one length; every token but the first of each is supervised."""
    number = len(tokens) // length
    supervised = np.ones(len(tokens), np.bool_)
    supervised[::length] = False
    starts = np.arange(number, dtype=np.int64) * length
    return Samples(TokenArrays(tokens, supervised), starts, np.full(number, length), np.full(number, length - 1))
