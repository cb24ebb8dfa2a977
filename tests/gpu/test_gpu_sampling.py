"""Sampling on a GPU: a row gets the same token and bits in every batch, and the kernel draws as the reference does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from weft.engine.inference.sampling import FAILED, Sampler, SamplerRows, choose
from weft.kernels.layers import draw
from weft.spec.sampling import Sampling

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
KINDS = [
    Sampling(),
    Sampling(temperature=1.0, logprobs=0),
    Sampling(temperature=0.8, min_p=0.05),
    Sampling(temperature=1.0, top_k=40, logprobs=3),
    Sampling(temperature=1.0, top_p=0.95),
    Sampling(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1),
]


@dataclass(eq=False)
class Row:
    sampling: Sampling
    prompt: list[int]
    tokens: list[int] = field(default_factory=lambda: [7])
    constraint: None = None

    @property
    def num_chosen(self) -> int:
        return len(self.tokens)


def found(logits_RV: torch.Tensor, rows: list[Row], chosen: list[int]) -> dict[int, tuple[Any, ...]]:
    """By index of the row: token, and log-probabilities as far as the row wants them."""
    tokens, logprobs = Sampler().choose(logits_RV[chosen], [rows[i] for i in chosen]).to_host()
    return {
        i: (token, None if (number := rows[i].sampling.logprobs) is None or own is None else own.only(number))
        for i, token, own in zip(chosen, tokens, logprobs, strict=True)
    }


@pytest.mark.parametrize("vocabulary", [128_256, 151_643])
def test_choose_when_batches_differ_then_each_row_has_its_bits_and_rows_of_nan_fail_alone(vocabulary):
    logits_RV = (3 * torch.randn(64, vocabulary, device=GPU)).bfloat16().float()
    rows = [Row(replace(KINDS[i % len(KINDS)], seed=i), [i, 5]) for i in range(64)]
    alone: dict[int, Any] = {}
    for i in range(64):
        alone |= found(logits_RV, rows, [i])
    for size in (64, 7, 33, 2, 50):
        chosen = random.Random(size).sample(range(64), size)
        assert found(logits_RV, rows, chosen) == {i: alone[i] for i in chosen}
    logits_RV[3], logits_RV[9, 5] = torch.nan, torch.inf
    dirty = found(logits_RV, rows, list(range(64)))
    assert [i for i in range(64) if dirty[i] != alone[i]] == [3, 9]
    assert dirty[3][0] == dirty[9][0] == FAILED


def test_draw_when_a_kernel_draws_then_tokens_are_the_references(monkeypatch):
    """But for a draw that falls on the border of two tokens: their exponentials differ in the last bit."""
    logits_RV = (3 * torch.randn(256, 128_256, device=GPU)).bfloat16().float()
    rows = [Row(replace(KINDS[1 + i % 4], seed=i), [i]) for i in range(256)]
    with_kernel = found(logits_RV, rows, list(range(256)))
    monkeypatch.setattr(draw, "runs_triton", lambda tensor: False)
    plain = found(logits_RV, rows, list(range(256)))
    assert sum(with_kernel[i][0] != plain[i][0] for i in range(256)) <= 2


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=9, top_p=0.9)])
def test_choose_when_drawn_often_then_follows_the_probabilities(sampling):
    number, logits_V = 40_000, 1.5 * torch.randn(40, device=GPU)
    rows = SamplerRows([Row(replace(sampling, seed=i), [1]) for i in range(number)], 40, GPU)
    tokens_R = choose(logits_V.expand(number, 40).contiguous(), rows).tokens_R
    ordered, ids = torch.softmax(logits_V.double() / sampling.temperature, 0).sort(descending=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = 0.0
    ordered /= ordered.sum()
    ordered[1:][(ordered.cumsum(0) - ordered)[1:] >= sampling.top_p] = 0.0
    expected = torch.zeros_like(ordered).scatter(0, ids, ordered / ordered.sum())
    share = torch.bincount(tokens_R, minlength=40) / number
    assert not share[expected == 0].any()
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / number).sqrt() + 1e-4).all()
