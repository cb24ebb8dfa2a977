"""Dropout masks behave like fair independent coins, and are a pure function of their keys."""

from __future__ import annotations

import math

import pytest
import torch

from weft.kernels.dropout import drop, keep_mask, mix, module_key, row_keys

FEATURES = 192
MODULE = module_key("model.layers.0.self_attn.q_proj")


def mask(key: int = 1, rows: int = 256, *, module: int = MODULE, features: int = FEATURES, p: float = 0.3):
    return keep_mask(torch.from_numpy(row_keys(key, rows).copy()), module, features, p)


def standard_error(p: float, number: int) -> float:
    return math.sqrt(p * (1 - p) / number)


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten().double(), y.flatten().double()]))[0, 1])


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_mask_when_drawn_then_drops_its_share(p):
    dropped = 1 - mask(rows=1024, p=p).double().mean()
    assert abs(dropped - p) <= 5 * standard_error(p, 1024 * FEATURES)


@pytest.mark.parametrize("dim", [0, 1])
def test_mask_when_drawn_then_every_row_and_feature_drops_its_share(dim):
    """The shares of the rows (or features) spread as those of independent coins do, no more and no less."""
    p = 0.3
    drawn = mask(rows=512, features=512, p=p)
    scores = (drawn.double().mean(dim) - (1 - p)) / standard_error(p, 512)
    assert scores.abs().max() < 5
    assert 0.8 < scores.square().mean() < 1.2


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16, 64, 128])
def test_mask_when_rows_or_features_are_neighbours_then_independent(distance):
    drawn = mask(rows=512, features=512, p=0.5)
    bound = 5 / math.sqrt(512 * (512 - distance))
    assert abs(correlation(drawn[distance:], drawn[:-distance])) < bound
    assert abs(correlation(drawn[:, distance:], drawn[:, :-distance])) < bound


def test_mask_when_any_two_rows_are_compared_then_none_are_alike():
    drawn = mask(rows=400, features=256, p=0.5).double() * 2 - 1
    products = drawn @ drawn.t() / math.sqrt(256)
    products.fill_diagonal_(0)
    assert products.abs().max() < 6
    assert 0.9 < products.square().sum() / (400 * 399) < 1.1


KEYS = {
    "seed": [mix(seed, 0, 0) for seed in range(40)],
    "step": [mix(42, step, 0) for step in range(40)],
    "index": [mix(42, 0, index) for index in range(40)],
    "small": list(range(40)),
    "row distance": [(1000 + i * 0x9E3779B1) & 0xFFFFFFFF for i in range(0, 4000, 100)],
}


@pytest.mark.parametrize("kind", KEYS)
def test_mask_when_keys_differ_then_independent(kind):
    drawn = torch.stack([mask(key, 16, p=0.5).flatten() for key in KEYS[kind]]).double() * 2 - 1
    number = drawn.shape[1]
    products = drawn @ drawn.t() / math.sqrt(number)
    products.fill_diagonal_(0)
    assert products.abs().max() < 5.5


def test_mask_when_modules_differ_then_independent():
    paths = [f"model.layers.{i}.{m}" for i in range(16) for m in ("q_proj", "k_proj", "v_proj")]
    drawn = torch.stack([mask(5, 16, module=module_key(path), p=0.5).flatten() for path in paths]).double() * 2 - 1
    products = drawn @ drawn.t() / math.sqrt(drawn.shape[1])
    products.fill_diagonal_(0)
    assert products.abs().max() < 5.5


def test_mask_when_drawn_again_then_the_same():
    assert torch.equal(mask(key=7, p=0.25), mask(key=7, p=0.25))


def test_mask_when_a_sample_is_shorter_then_it_is_the_start_of_the_longer_ones():
    """A row's coins depend on its position and not on how many rows there are; likewise features."""
    assert torch.equal(mask(3, 10), mask(3, 256)[:10])
    assert torch.equal(mask(3, 10, features=50), mask(3, 10)[:, :50])


def test_drop_when_applied_then_keeps_the_mean_and_drops_even_nan():
    x = torch.full((64, FEATURES), 2.0)
    keep = mask(rows=64, p=0.25)
    assert torch.equal(drop(x, keep, 0.25), torch.where(keep, torch.tensor(2 / 0.75), torch.tensor(0.0)))
    assert not drop(torch.full_like(x, math.nan), keep, 0.25)[~keep].isnan().any()


def test_mix_when_arguments_differ_in_one_bit_then_half_the_bits_change():
    changed = []
    for position in range(3):
        for bit in range(32):
            values = [11, 22, 33]
            before = mix(*values)
            values[position] ^= 1 << bit
            changed.append((before ^ mix(*values)).bit_count())
    assert 14 < sum(changed) / len(changed) < 18
    assert min(changed) >= 5


def test_mix_when_arguments_swap_then_another_number():
    assert len({mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(0, 1, 2), mix(1 << 32, 2), mix(3, 0)}) == 6
