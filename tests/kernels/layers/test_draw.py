"""Tokens drawn from rows of scores: the kernel finds what the reference finds, row by row."""

from __future__ import annotations

import pytest
import torch

import weft.kernels.layers.draw as module
from weft.kernels.layers import cross_entropy
from weft.kernels.layers.draw import (
    DrawSettings,
    draw_kernel,
    draw_reference,
    normalisers,
    normalisers_reference,
    uniforms,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)


def settings(number: int, **given: float) -> DrawSettings:
    values = {"temperature": 0.8, "min_p": 0.0, "top_k": 10**6, "top_p": 1.0, **given}
    types = {"temperature": torch.float32, "top_k": torch.int64}
    columns = {
        f"{name}_R": torch.full((number,), value, dtype=types.get(name, torch.float64))
        for name, value in values.items()
    }
    return DrawSettings(**columns, seed_R=torch.arange(number), position_R=torch.arange(number) * 7)


def scores(number: int, size: int) -> torch.Tensor:
    """With some equal ones, and some that are excluded."""
    scores_RV = (2 * torch.randn(number, size, generator=torch.Generator().manual_seed(size))).bfloat16().float()
    scores_RV[:, 3] = -torch.inf
    return scores_RV


def drawn(run, scores_RV: torch.Tensor, rows_G: torch.Tensor, given: DrawSettings, is_ranked: bool) -> list[int]:
    if is_ranked:
        scores_RV = scores_RV[rows_G].sort(dim=1, descending=True, stable=True).values
    elif run is draw_reference:
        scores_RV = scores_RV[rows_G]
    return run(scores_RV, rows_G, given, is_ranked).tolist()


@pytest.mark.parametrize("size", [5, 16, 50])
@pytest.mark.parametrize(
    "given",
    [{}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}, {"top_p": 1e-300}],
)
def test_draw_when_run_as_a_kernel_then_draws_what_the_reference_draws(size, given):
    scores_RV, columns, rows_G = scores(12, size), settings(12, **given), torch.arange(11, -1, -1)
    for is_ranked in (False, True) if set(given) <= {"min_p"} else (True,):
        found, expected = (drawn(run, scores_RV, rows_G, columns, is_ranked) for run in (draw_kernel, draw_reference))
        assert found == expected
        assert (len(set(expected)) > 1) == (given.get("top_p") != 1e-300)


def test_draw_when_a_row_is_not_finite_then_the_others_draw_the_same():
    clean_RV, rows_G = scores(6, 50), torch.arange(6)
    dirty_RV = clean_RV.clone()
    dirty_RV[1, 40], dirty_RV[3, 2], dirty_RV[4] = torch.nan, torch.inf, -torch.inf
    for is_ranked in (False, True):
        columns = settings(6, top_p=0.9 if is_ranked else 1.0)
        clean, dirty = (drawn(draw_kernel, x, rows_G, columns, is_ranked) for x in (clean_RV, dirty_RV))
        assert [clean[i] for i in (0, 2, 5)] == [dirty[i] for i in (0, 2, 5)]
        assert all(0 <= token < 50 for token in dirty)


@pytest.mark.parametrize("size", [5, 50])
def test_normalisers_when_computed_then_are_those_of_torch_and_each_rows_own(size):
    logits_RV = scores(4, size)
    expected_R = logits_RV.double().logsumexp(1)
    torch.testing.assert_close(normalisers_reference(logits_RV), expected_R, rtol=1e-6, atol=1e-6)
    logits_RV[1, 2] = torch.nan
    kept = [0, 2, 3]
    assert normalisers_reference(logits_RV)[kept].equal(normalisers_reference(logits_RV[kept]))


def test_normalisers_when_on_a_gpu_then_log_probabilities_have_the_bits_of_the_loss(monkeypatch):
    for each in (module, cross_entropy):
        monkeypatch.setattr(each, "runs_triton", lambda tensor: True)
    logits_RV, tokens_R = scores(4, 50), torch.tensor([3, 0, 49, 7])
    logits_RV[1:] = logits_RV[1:].clamp(min=-20)
    logits_RV[0, 3] = -torch.inf
    losses_R = cross_entropy.cross_entropy_rows_kernel(logits_RV, tokens_R, None)[0]
    chosen_R = logits_RV.gather(1, tokens_R[:, None])[:, 0].double()
    found_R = normalisers(logits_RV, tokens_R)
    assert (chosen_R - found_R).float().equal(-losses_R)
    torch.testing.assert_close(found_R, logits_RV.double().logsumexp(1), rtol=1e-6, atol=1e-6)


def test_uniforms_when_seed_or_position_change_then_are_even_and_unrelated():
    seeds, positions = torch.arange(400), torch.arange(100)
    u = uniforms(seeds[:, None].expand(400, 100).reshape(-1), positions.repeat(400)).view(400, 100)
    assert u.min() >= 0 and u.max() < 1 and u.unique().numel() == u.numel()
    counts = torch.histc(u.float(), 20, 0.0, 1.0)
    assert ((counts - 2000).abs() < 5 * 2000**0.5).all()
    for one, other in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        correlation = torch.corrcoef(torch.stack([one.reshape(-1), other.reshape(-1)]))[0, 1]
        assert correlation.abs() < 5 / one.numel() ** 0.5
