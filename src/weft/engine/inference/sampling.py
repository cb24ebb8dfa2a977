"""Chooses the next tokens of many sequences at once, on the device, without waiting for it.

    scores  = logits, then bias, repetition penalty (tokens of prompt and answer), frequency and presence penalty
              (tokens of the answer), as in vLLM
    greedy  argmax of the scores; equal scores go to the lower id
    drawn   by `kernels/layers/draw.py`, from scores, settings, seed and position

**A row's result depends on the row alone**: sums are sums of integers, exact in any order, and all else is elementwise,
a maximum or a stable sort. So it has the same bits on any row, in any batch and beside rows of NaN. Columns of -inf,
such as other jobs' new tokens, change nothing.

Shape suffixes: R rows, G rows of a group, P rows with penalties, V vocabulary, K ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.engine.inference.grammar import Constraint, allowed_tokens
from weft.errors import JobError
from weft.kernels.device_event import AsyncCopy
from weft.kernels.layers.draw import DrawSettings, draw, normalisers, rows_at_once
from weft.spec.sampling import Sampling

FAILED = -1
"""Token of a row whose logits are not finite."""
_IN_PROMPT = 2**30
"""Bit of a count: the prompt has the token."""


class Sequenced(Protocol):
    """A sequence to sample from: its settings and its tokens so far."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_chosen(self) -> int:
        """Number of tokens so far, with one that is chosen and not written yet."""
        ...

    @property
    def constraint(self) -> Constraint | None: ...


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution: temperature 1, no penalties, no filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, likeliest first."""

    def only(self, num_top: int) -> TokenLogprobs:
        return replace(self, top=self.top[:num_top])


@dataclass(frozen=True)
class Chosen:
    """Tokens of rows, on the device; `FAILED` where logits were not finite."""

    tokens_R: torch.Tensor
    logprobs_R: torch.Tensor | None = None
    top_tokens_RK: torch.Tensor | None = None
    top_logprobs_RK: torch.Tensor | None = None

    def to_host(self) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        """Tokens, and log-probabilities if any row wants them."""
        return ChosenCopy(self).get()


class ChosenCopy:
    """Chosen tokens on their way to the host, in one transfer."""

    def __init__(self, chosen: Chosen) -> None:
        rows = chosen.tokens_R[:, None]
        self._num_top: int | None = None
        if chosen.logprobs_R is not None and chosen.top_tokens_RK is not None and chosen.top_logprobs_RK is not None:
            self._num_top = chosen.top_tokens_RK.shape[1]
            columns = (rows, chosen.logprobs_R[:, None], chosen.top_tokens_RK, chosen.top_logprobs_RK)
            # float64 holds token ids and float32 numbers exactly.
            rows = torch.cat([column.double() for column in columns], dim=1)
        self._copy = AsyncCopy(rows).begin()

    def get(self) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        rows = self._copy.get().tolist()
        tokens = [int(row[0]) for row in rows]
        if self._num_top is None:
            return tokens, [None] * len(tokens)
        tops = [tuple((int(t), p) for t, p in zip(row[2:], row[2 + self._num_top :], strict=False)) for row in rows]
        return tokens, [TokenLogprobs(int(row[0]), row[1], top) for row, top in zip(rows, tops, strict=True)]


class SamplerRows:
    """Settings, positions and counts of the rows of a batch, on the device. Made once for a set of sequences; each
    `choose` moves it on by one token."""

    def __init__(
        self,
        sequences: Sequence[Sequenced],
        vocabulary: int,
        device: torch.device,
        counts_of: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`counts_of`: counts of some of the sequences, by `id`."""
        settings = [sequence.sampling for sequence in sequences]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        def indices(chosen: Sequence[bool]) -> torch.Tensor | None:
            return column([r for r, is_in in enumerate(chosen) if is_in], torch.int64) if any(chosen) else None

        self.vocabulary = vocabulary
        wanted = [each.logprobs for each in settings if each.logprobs is not None]
        self.num_top = max(wanted, default=None)
        self.ranked_G = indices([each.is_ranked for each in settings])
        self.plain_G = indices([not each.is_greedy and not each.is_ranked for each in settings])
        self.drawing: DrawSettings | None = None
        if self.ranked_G is not None or self.plain_G is not None:
            self.drawing = DrawSettings(
                temperature_R=column([each.temperature for each in settings], torch.float32),
                min_p_R=column([each.min_p for each in settings], torch.float64),
                top_k_R=column([each.top_k or vocabulary for each in settings], torch.int64),
                top_p_R=column([each.top_p for each in settings], torch.float64),
                seed_R=column([each.seed for each in settings], torch.int64),
                position_R=column([len(each.prompt) + each.num_chosen for each in sequences], torch.int64),
            )
        penalised = [each.has_penalties for each in settings]
        self.penalised_P = indices(penalised)
        if self.penalised_P is not None:
            own = self._counted = [sequence for sequence, is_in in zip(sequences, penalised, strict=True) if is_in]
            self.repetition_P = column([each.sampling.repetition_penalty for each in own], torch.float32)
            self.presence_P = column([each.sampling.presence_penalty for each in own], torch.float32)
            self.frequency_P = column([each.sampling.frequency_penalty for each in own], torch.float32)
            known = counts_of or {}
            counts = [known[id(e)] if id(e) in known else _counts(e, vocabulary, device) for e in own]
            self.counts_PV = torch.stack(counts)
        biases = [(r, t, b) for r, each in enumerate(settings) for t, b in each.logit_bias.items() if t < vocabulary]
        self.has_bias = bool(biases)
        if self.has_bias:
            self.bias_rows, self.bias_tokens = (column([b[i] for b in biases], torch.int64) for i in (0, 1))
            self.biases = column([b[2] for b in biases], torch.float32)

    def counts_of(self, sequences: Iterable[Sequenced]) -> dict[int, torch.Tensor]:
        """Counts of the given sequences that are in this batch and have penalties, by `id`."""
        if self.penalised_P is None:
            return {}
        wanted = set(map(id, sequences))
        return {id(each): self.counts_PV[p] for p, each in enumerate(self._counted) if id(each) in wanted}

    def scores(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Logits with bias and penalties; the same tensor if no row has any."""
        if not self.has_bias and self.penalised_P is None:
            return logits_RV
        scores_RV = logits_RV.clone()
        if self.has_bias:
            scores_RV[self.bias_rows, self.bias_tokens] += self.biases
        if self.penalised_P is not None:
            x_PV = scores_RV[self.penalised_P]
            repetition_P1 = self.repetition_P[:, None]
            repeated_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
            x_PV = torch.where(self.counts_PV > 0, repeated_PV, x_PV)
            written_PV = self.counts_PV & (_IN_PROMPT - 1)
            x_PV -= self.frequency_P[:, None] * written_PV
            x_PV -= self.presence_P[:, None] * (written_PV > 0)
            scores_RV[self.penalised_P] = x_PV
        return scores_RV

    def move_on(self, tokens_R: torch.Tensor) -> None:
        if self.drawing is not None:
            self.drawing.position_R.add_(1)
        if self.penalised_P is not None:
            tokens_P1 = tokens_R[self.penalised_P].clamp(min=0)[:, None]
            self.counts_PV.scatter_add_(1, tokens_P1, torch.ones_like(tokens_P1, dtype=torch.int32))


class Sampler:
    """Chooses tokens for sequences that come and go; what is known of those that stay is kept on the device."""

    def __init__(self) -> None:
        self._sequences: list[Sequenced] = []
        """Sequences of the last call, kept so that no other object gets the `id` of one of them."""
        self._expected: dict[int, int] = {}
        """Number of tokens that each sequence has in the next call, by `id`."""
        self._rows: SamplerRows | None = None

    def choose(self, logits_RV: torch.Tensor, sequences: Sequence[Sequenced]) -> Chosen:
        """The next tokens of the sequences, whose logits are float32; the caller adds them to the sequences."""
        vocabulary, now = logits_RV.shape[1], {id(each): each.num_chosen for each in sequences}
        rows = self._rows if self._rows is not None and self._rows.vocabulary == vocabulary else None
        if rows is None or list(now.items()) != list(self._expected.items()):
            going_on = [each for each in sequences if self._expected.get(id(each)) == each.num_chosen]
            known = rows.counts_of(going_on) if rows is not None else None
            rows = self._rows = SamplerRows(sequences, vocabulary, logits_RV.device, known)
        self._expected = {which: number + 1 for which, number in now.items()}
        self._sequences = list(sequences)
        return choose(logits_RV.float(), rows, allowed=Allowed.by(sequences, vocabulary, logits_RV.device))


@dataclass(frozen=True)
class Allowed:
    """Tokens that rows with a constraint may have."""

    rows_P: torch.Tensor
    tokens_PV: torch.Tensor
    """True for each token that the row may have."""

    @classmethod
    def by(cls, sequences: Sequence[Sequenced], vocabulary: int, device: torch.device) -> Allowed | None:
        found = {r: each.constraint for r, each in enumerate(sequences) if each.constraint is not None}
        if not found:
            return None
        return cls(torch.tensor(list(found)).to(device), allowed_tokens(list(found.values()), vocabulary, device))

    def scores(self, scores_RV: torch.Tensor) -> torch.Tensor:
        own_PV = scores_RV[self.rows_P].masked_fill(~self.tokens_PV, -torch.inf)
        return scores_RV.index_copy(0, self.rows_P, own_PV)


def choose(logits_RV: torch.Tensor, rows: SamplerRows, *, allowed: Allowed | None = None) -> Chosen:
    """The next token of each row, with log-probabilities if a row wants them."""
    largest_R, tokens_R = logits_RV.max(1)
    scores_RV = rows.scores(logits_RV)
    if allowed is not None:
        scores_RV = allowed.scores(scores_RV)
    if scores_RV is not logits_RV:
        tokens_R = scores_RV.argmax(1)
    for rows_G, is_ranked in ((rows.plain_G, False), (rows.ranked_G, True)):
        if rows_G is not None and rows.drawing is not None:
            drawn_G = draw(scores_RV, rows_G, rows.drawing, is_ranked=is_ranked)
            tokens_R = drawn_G if len(rows_G) == len(tokens_R) else tokens_R.index_copy(0, rows_G, drawn_G)
    tokens_R = torch.where(largest_R.isfinite(), tokens_R, FAILED)
    rows.move_on(tokens_R)
    if rows.num_top is None:
        return Chosen(tokens_R)
    return score(logits_RV, tokens_R, rows.num_top)


def score(logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int) -> Chosen:
    """Given tokens with their log-probabilities and those of the likeliest ones."""
    known_R, top_RK = tokens_R.clamp(min=0), likeliest(logits_RV, num_top)
    normaliser_R = normalisers(logits_RV, known_R)
    logprobs_RK = logprobs_of(logits_RV, torch.cat((known_R[:, None], top_RK), 1), normaliser_R)
    return Chosen(tokens_R, logprobs_RK[:, 0], top_RK, logprobs_RK[:, 1:])


def check(token: int) -> None:
    """JobError for the token of a row whose logits were not finite."""
    if token == FAILED:
        raise JobError("the model's logits are not finite, so no token can be chosen.")


def logprobs_of(logits_RV: torch.Tensor, tokens_RK: torch.Tensor, normaliser_R: torch.Tensor) -> torch.Tensor:
    return (logits_RV.gather(1, tokens_RK).to(normaliser_R.dtype) - normaliser_R[:, None]).float()


def likeliest(logits_RV: torch.Tensor, number: int) -> torch.Tensor:
    """int64 [R, number]: ids of the likeliest tokens, equal ones by id."""
    num_tokens = logits_RV.shape[1]
    if number == 0:
        return torch.empty(len(logits_RV), 0, dtype=torch.int64, device=logits_RV.device)
    last_first_V = torch.arange(num_tokens - 1, -1, -1, device=logits_RV.device)
    parts = []
    for x_BV in logits_RV.split(rows_at_once(num_tokens)):
        # The bits of floats as integers in the order of the floats; -0.0 becomes 0.0.
        bits_BV = (x_BV + 0.0).view(torch.int32).long()
        ordered_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)
        keys_BV = (ordered_BV << 32) + last_first_V
        parts.append(num_tokens - 1 - (keys_BV.topk(min(number, num_tokens), 1).values & 0xFFFFFFFF))
    return torch.cat(parts)


def _counts(sequence: Sequenced, vocabulary: int, device: torch.device) -> torch.Tensor:
    """int32 [V]: how often the answer has each token, with a bit for those of the prompt."""

    def ids(tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor([token for token in tokens if token < vocabulary], dtype=torch.int64).to(device)

    counts_V = torch.zeros(vocabulary, dtype=torch.int32, device=device)
    for known, value in ((ids(sequence.tokens), 1), (ids({*sequence.prompt}), _IN_PROMPT)):
        counts_V.index_add_(0, known, torch.full_like(known, value, dtype=torch.int32))
    return counts_V
