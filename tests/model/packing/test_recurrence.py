"""Chunks of a recurrence against its definition, token by token: values, gradients, states, borders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.model.packing import recurrence
from weft.model.packing.recurrence import causal_convolution, chunks_of, linear_attention, one_token, recomputed

HEADS, KEY, VALUE = 3, 16, 20
LENGTHS = [1, 3, 4, 63, 64, 65, 129]
Given = list[torch.Tensor]


def drawn(length: int, seed: int = 0, *, strongest: float = 0.5, has_strength: bool = True) -> Given:
    """Queries, keys, values, decays and strengths of a sample's tokens."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        F.normalize(torch.randn(length, HEADS, KEY, generator=generator), dim=-1) * factor for factor in (KEY**-0.5, 1)
    )
    value = torch.randn(length, HEADS, VALUE, generator=generator)
    decay, strength = (torch.rand(length, HEADS, generator=generator) for _ in range(2))
    return [query, key, value, -strongest * decay, *([strength] if has_strength else [])]


def chunked(given: Given, lengths: list[int], states: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    strength = given[4] if len(given) == 5 else None
    return linear_attention(*given[:4], strength, lengths, states)


def by_tokens(given: Given) -> torch.Tensor:
    """The definition, one token after the other, in the type of what is given."""
    state = given[0].new_zeros(HEADS, KEY, VALUE)
    outputs = []
    for query, key, value, decay, *strength in zip(*given, strict=True):
        state = state * decay.exp()[:, None, None]
        if strength:
            value = strength[0][:, None] * (value - (state * key[..., None]).sum(1))
        state = state + key[..., None] * value[:, None]
        outputs.append((state * query[..., None]).sum(1))
    return torch.stack(outputs)


def gradients(run, given: Given) -> Given:
    leaves = [x.clone().requires_grad_() for x in given]
    output = run(leaves)
    generator = torch.Generator().manual_seed(9)
    return list(torch.autograd.grad(output, leaves, torch.randn(output.shape, generator=generator).to(output.dtype)))


def error(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine - other).abs().max() / other.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("has_strength", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_when_compared_with_tokens_then_equal(length, has_strength):
    given = drawn(length, has_strength=has_strength)
    exact = [x.double() for x in given]
    assert error(chunked(given, [length])[0], by_tokens(exact)) <= 1e-6
    mine = gradients(lambda x: chunked(x, [length])[0], given)
    for ours, theirs in zip(mine, gradients(by_tokens, exact), strict=True):
        # One token reads nothing of an earlier state.
        assert error(ours, theirs) <= 1e-6 or theirs.abs().max() == ours.abs().max() == 0


def test_chunks_when_the_decay_is_strong_then_finite_and_equal():
    given = drawn(129, strongest=30.0)
    assert error(chunked(given, [129])[0], by_tokens([x.double() for x in given])) <= 2e-5
    mine = gradients(lambda x: chunked(x, [129])[0], given)
    for ours, theirs in zip(mine, gradients(by_tokens, [x.double() for x in given]), strict=True):
        assert error(ours, theirs) <= 2e-5


def test_one_token_when_repeated_then_continues_what_chunks_left():
    given = drawn(75)
    expected, end = chunked(given, [75])
    _, state = chunked([x[:70] for x in given], [70])
    for token in range(70, 75):
        output, state = one_token(*(x[token : token + 1] for x in given), state)
        assert error(output[0], expected[token]) <= 1e-6
    assert error(state, end) <= 1e-6


def test_chunks_when_samples_are_computed_at_once_then_each_as_alone():
    """As on a GPU: samples of one and of several chunks, in any order, one beside another's NaN."""
    lengths = [3, 130, 64, 1, 65]
    samples = [drawn(length, seed) for seed, length in enumerate(lengths)]
    samples[2][2][5] = float("nan")
    states = torch.randn(len(lengths), HEADS, KEY, VALUE)
    joined = [torch.cat(parts) for parts in zip(*samples, strict=True)]
    for given in (None, states):
        outputs, left = chunked(joined, lengths, given)
        for index, (output, sample) in enumerate(zip(outputs.split(lengths), samples, strict=True)):
            alone, end = chunked(sample, lengths[index : index + 1], None if given is None else given[index, None])
            assert index == 2 or (error(output, alone) <= 1e-6 and error(left[index], end[0]) <= 1e-6)


def test_blocks_when_samples_are_computed_at_once_then_each_has_the_bits_it_has_alone(monkeypatch):
    """As on a GPU: every product has a fixed number of chunks, so neighbours change neither values nor gradients."""
    sizes, product = set(), torch.matmul
    monkeypatch.setattr(recurrence, "is_cpu", lambda device: False)
    monkeypatch.setattr(torch, "matmul", lambda left, right: (sizes.add(len(left)), product(left, right))[1])
    lengths = [3, 130, 64, 1, 65, 700, 9, 20, 31, 200]
    samples = [drawn(length, seed) for seed, length in enumerate(lengths)]
    joined = [torch.cat(parts) for parts in zip(*samples, strict=True)]
    outputs = chunked(joined, lengths)[0].split(lengths)
    slopes = zip(*(x.split(lengths) for x in squared_slopes(joined, lengths)), strict=True)
    for output, slope, sample, length in zip(outputs, slopes, samples, lengths, strict=True):
        if length > 1:
            assert torch.equal(output, chunked(sample, [length])[0])
            assert all(torch.equal(*pair) for pair in zip(slope, squared_slopes(sample, [length]), strict=True))
    assert sizes == {recurrence.BLOCK}


def squared_slopes(given: Given, lengths: list[int]) -> Given:
    leaves = [x.clone().requires_grad_() for x in given]
    return list(torch.autograd.grad(chunked(leaves, lengths)[0].square().sum(), leaves))


def test_chunks_of_when_cut_and_joined_then_the_same_rows():
    x = torch.randn(263, 2, 3)
    chunks = chunks_of((3, 130, 64, 1, 65), x.device)
    assert chunks.num_chunks == 8 and [step.stop - step.start for step in chunks.steps] == [5, 2, 1]
    assert torch.equal(chunks.join(chunks.cut(x)), x)


def test_a_sample_when_more_follows_then_its_first_tokens_keep_their_bits():
    given = drawn(130)
    assert torch.equal(chunked(given, [130])[0][:70], chunked([x[:70] for x in given], [70])[0])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_convolution_when_a_sample_is_short_then_sees_zeros_before_it(length):
    generator = torch.Generator().manual_seed(length)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((length, 6), (6, 4), (6,)))
    expected = F.conv1d(x.t()[None], weight[:, None], bias, padding=3, groups=6)[0, :, :length].t()
    mine, rows = causal_convolution(x, weight, bias, [length], [None])
    assert error(mine, expected) <= 1e-6
    assert torch.equal(rows[0], F.pad(x, (0, 0, 3, 0))[-3:])


def test_convolution_when_samples_are_packed_or_continued_then_each_as_alone():
    lengths = [2, 7, 1]
    x, weight = torch.randn(10, 6), torch.randn(6, 4)
    x[3] = float("nan")
    packed, rows = causal_convolution(x, weight, None, lengths, [None] * 3)
    for index, (part, mine) in enumerate(zip(x.split(lengths), packed.split(lengths), strict=True)):
        alone = causal_convolution(part, weight, None, [len(part)], [None])
        assert torch.allclose(mine, alone[0], equal_nan=True)
        assert torch.equal(rows[index].nan_to_num(), alone[1][0].nan_to_num())
    first, left = causal_convolution(x[4:6], weight, None, [2], [None])
    second, _ = causal_convolution(x[6:9], weight, None, [3], left)
    assert torch.equal(torch.cat([first, second]), causal_convolution(x[4:9], weight, None, [5], [None])[0])


def test_recomputed_when_it_goes_back_then_has_the_bits_of_the_plain_function():
    given = drawn(70)
    plain = gradients(lambda x: chunked(x, [70])[0], given)
    again = gradients(lambda x: recomputed(lambda *y: chunked(list(y), [70])[0], *x), given)
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
