"""Tokens are chosen for many rows at once, and each row gets what it would get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from weft.engine.inference.sampling import FAILED, Sampler, SamplerRows, TokenLogprobs, choose, likeliest
from weft.errors import ConfigError
from weft.spec.sampling import Sampling

VOCABULARY = 1003
"""Odd, so that rows begin at any alignment."""


@dataclass(eq=False)
class Row:
    """A sequence and its logits."""

    sampling: Sampling
    logits: torch.Tensor
    prompt: list[int] = field(default_factory=lambda: [3, 4])
    tokens: list[int] = field(default_factory=list)
    constraint: None = None

    @property
    def num_chosen(self) -> int:
        return len(self.tokens)


def logits_of(seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Of bfloat16's precision, as heads compute them: there are many equal ones."""
    return (4 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


KINDS = [
    Sampling(),
    Sampling(logprobs=3),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, min_p=0.05, logprobs=0),
    Sampling(temperature=1.5, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, logprobs=5),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={7: 5.0, 8: -100.0}),
]


def rows(number: int) -> list[Row]:
    return [
        Row(replace(KINDS[i % len(KINDS)], seed=i), logits_of(i), [5, i % 9, 5], [5, 6 + i % 3] * (i % 4))
        for i in range(number)
    ]


def chosen(given: list[Row]) -> list[tuple[int, TokenLogprobs | None]]:
    logits = torch.stack([row.logits for row in given])
    tokens, logprobs = Sampler().choose(logits, given).to_host()
    return list(zip(tokens, logprobs, strict=True))


def trimmed(row: Row, got: tuple[int, TokenLogprobs | None]) -> tuple:
    """The row's own request."""
    token, logprobs = got
    if row.sampling.logprobs is None or logprobs is None:
        return (token,)
    return token, logprobs.logprob, logprobs.top[: row.sampling.logprobs]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_choose_when_batches_are_shuffled_then_each_row_gets_the_bits_it_has_alone(size):
    everyone = rows(64)
    alone = {id(row): trimmed(row, chosen([row])[0]) for row in everyone}
    assert len({got[0] for got in alone.values()}) > 40
    for round_ in range(4):
        random.Random(round_).shuffle(everyone)
        for start in range(0, 64, size):
            group = everyone[start : start + size]
            for row, got in zip(group, chosen(group), strict=True):
                assert trimmed(row, got) == alone[id(row)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_choose_when_rows_are_not_finite_then_they_fail_alone(value):
    good = rows(len(KINDS))
    bad = [Row(each.sampling, torch.full((VOCABULARY,), value)) for each in good]
    half = [Row(each.sampling, torch.where(torch.arange(VOCABULARY) == 900, value, each.logits)) for each in good]
    got = chosen([row for three in zip(bad, good, half, strict=True) for row in three])
    assert [token for token, _ in got[0::3]] == [FAILED] * len(bad)
    # A token that is excluded by -inf is no failure of the row.
    assert all((token == FAILED) == (value != float("-inf")) for token, _ in got[2::3])
    for row, mine in zip(good, got[1::3], strict=True):
        assert trimmed(row, mine) == trimmed(row, chosen([row])[0])


def test_choose_when_greedy_then_takes_the_likeliest_token_and_of_equal_ones_the_first():
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 70] = logits[0, 600] = 2.0
    logits[1, 5] = -1.0
    logits[2] = logits_of(1)
    given = [Row(Sampling(), row) for row in logits]
    assert [token for token, _ in chosen(given)] == [70, 0, int(logits_of(1).argmax())]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-300}, {"min_p": 1.0}])
def test_choose_when_one_token_is_left_then_it_is_the_greedy_one(settings):
    for seed in range(30):
        row = Row(Sampling(temperature=1.0, seed=seed, **settings), logits_of(seed, 4001) + torch.rand(4001))
        assert chosen([row])[0][0] == int(row.logits.argmax())


def test_choose_when_tokens_are_equal_at_the_border_then_the_first_ids_stay():
    logits = torch.full((VOCABULARY,), 0.0)
    logits[500] = 1.0
    # Token 500 has a weight of e, all others of 1.
    for settings, kept in (({"top_k": 4}, {500, 0, 1, 2}), ({"top_p": 4 / (VOCABULARY + 2)}, {500, 0, 1})):
        given = [Row(Sampling(temperature=1.0, seed=seed, **settings), logits) for seed in range(200)]
        assert {token for token, _ in chosen(given)} == kept


def expected_shares(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities of tokens, after the definitions."""
    p = torch.softmax(logits.double() / sampling.temperature, 0)
    p = torch.where(p >= sampling.min_p * p.max(), p, 0.0)
    ordered, tokens = p.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = 0.0
    ordered /= ordered.sum()
    ordered[1:][(ordered.cumsum(0) - ordered)[1:] >= sampling.top_p] = 0.0
    return torch.zeros_like(p).scatter(0, tokens, ordered / ordered.sum())


@pytest.mark.parametrize(
    "sampling", [k for k in KINDS if k.temperature and not k.has_penalties] + [Sampling(temperature=1.0, top_k=3)]
)
@pytest.mark.parametrize("vocabulary", [50, 300])
def test_choose_when_drawn_often_then_follows_the_probabilities(sampling, vocabulary):
    number, logits = 4000, logits_of(0, vocabulary)
    given = [Row(replace(sampling, seed=i), logits) for i in range(number)]
    share = torch.bincount(torch.tensor([t for t, _ in chosen(given)]), minlength=vocabulary) / number
    expected = expected_shares(logits, sampling)
    assert not share[expected == 0].any()
    error = (expected * (1 - expected) / number).sqrt()
    assert ((share - expected).abs() <= 5 * error + 1e-3).all()


def test_choose_when_penalties_are_given_then_scores_are_vllms():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5, 3.0]])
    row = Row(
        Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={5: -1.0}),
        logits[0],
        [0, 1, 0],
        [2, 1, 2],
    )
    scores = SamplerRows([row], 6, torch.device("cpu")).scores(logits)
    assert scores.tolist() == [[1.0, -4.0 - 0.25 - 0.5, 0.5 - 0.25 - 1.0, -1.0, 0.5, 2.0]]


def test_sampler_when_sequences_come_and_go_then_counts_are_those_of_their_tokens():
    kept = [Row(replace(KINDS[8], seed=i), logits_of(i)) for i in range(4)]
    sampler, present = Sampler(), kept[:2]
    for step in range(6):
        logits = torch.stack([row.logits for row in present])
        tokens, _ = sampler.choose(logits, present).to_host()
        for row, token in zip(present, tokens, strict=True):
            assert token == chosen([row])[0][0]
            row.tokens.append(token)
        present = [kept[3], *present] if step == 2 else present[1:] if step == 4 else present
    # One that starts again with other tokens is counted again.
    present[0].tokens = [1, 1]
    assert sampler.choose(torch.stack([r.logits for r in present]), present).tokens_R[0] == chosen(present)[0][0]


def test_sampler_when_a_neighbour_has_more_tokens_then_the_others_draw_the_same():
    """New tokens of one job are columns of -inf for the others."""
    given = rows(len(KINDS) * 2)
    sampler = Sampler()
    for width in (VOCABULARY, 1030, VOCABULARY):
        logits = torch.full((len(given), width), float("-inf"))
        logits[:, :VOCABULARY] = torch.stack([row.logits for row in given])
        tokens, _ = sampler.choose(logits, given).to_host()
        assert tokens == [chosen([row])[0][0] for row in given]
        for row, token in zip(given, tokens, strict=True):
            row.tokens.append(token)


def test_choose_when_logprobs_are_wanted_then_are_of_the_model_before_settings_apply():
    row = Row(Sampling(temperature=0.5, top_k=9, logit_bias={3: 2.0}, logprobs=4, seed=1), logits_of(2))
    ((token, logprobs),) = chosen([row])
    expected = torch.log_softmax(row.logits.double(), 0)
    assert logprobs is not None and logprobs.token == token
    assert logprobs.logprob == pytest.approx(float(expected[token]), rel=1e-6)
    ordered, ids = expected.sort(descending=True, stable=True)
    assert [t for t, _ in logprobs.top] == ids[:4].tolist()
    assert [p for _, p in logprobs.top] == pytest.approx(ordered[:4].tolist(), rel=1e-6)


def test_likeliest_when_tokens_are_equal_then_the_first_ids_come_first():
    logits = torch.tensor([[0.0, -0.0, 1.0, -3.0, 1.0, -1.0]])
    assert likeliest(logits, 5).tolist() == [[2, 4, 0, 1, 5]]
    assert likeliest(logits, 20).tolist() == [[2, 4, 0, 1, 5, 3]]


def test_choose_when_there_are_more_weights_than_fit_then_rows_are_drawn_in_parts(monkeypatch):
    given = rows(30)
    whole = chosen(given)
    monkeypatch.setattr("weft.kernels.layers.draw.MOST_WEIGHTS", 4 * VOCABULARY)
    assert chosen(given) == whole


def test_choose_when_the_batch_goes_on_then_positions_move():
    row = Row(Sampling(temperature=1.0, seed=5), torch.zeros(VOCABULARY))
    state = SamplerRows([row], VOCABULARY, torch.device("cpu"))
    first = [int(choose(row.logits[None], state).tokens_R) for _ in range(5)]
    second = []
    for token in first:
        second.append(chosen([row])[0][0])
        row.tokens.append(token)
    assert first == second and len(set(first)) == 5


BAD = {
    "temperature": (-1.0, "must be 0 or at least 0.001, got -1."),
    "top_p": (0.0, "must be above 0 and at most 1, got 0."),
    "top_k": (-1, "must be at least 0 and at most 2147483647, got -1."),
    "min_p": (1.5, "must be at least 0 and at most 1, got 1.5."),
    "repetition_penalty": (0.0, "must be above 0 and at most 100, got 0."),
    "presence_penalty": (2.5, "must be at least -2 and at most 2, got 2.5."),
    "frequency_penalty": (float("nan"), "must be at least -2 and at most 2, got nan."),
    "seed": (-1, "must be at least 0 and below 4294967296, got -1."),
    "logprobs": (21, "must be at least 0 and at most 20, got 21."),
    "logit_bias": ({5: 101.0}, "must be -100 to 100 for token ids, got 101 for 5."),
}


@pytest.mark.parametrize("name", BAD)
def test_sampling_when_a_value_is_wrong_then_one_sentence_names_what_is_accepted(name):
    value, sentence = BAD[name]
    with pytest.raises(ConfigError) as refused:
        Sampling(**{name: value})
    assert str(refused.value) == f"{name}: {sentence}"
