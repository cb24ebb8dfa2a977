"""Directions found from rows that come a few at a time are those of all rows at once."""

from __future__ import annotations

import torch

from weft.methods.lora.principal import PrincipalInputs

D, R = 40, 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def rows(number: int) -> torch.Tensor:
    """Rows around a mean that varies less from feature to feature, turned by a rotation."""
    turn_DD = torch.linalg.qr(torch.randn(D, D))[0]
    return (torch.randn(number, D) * 0.6 ** torch.arange(D)) @ turn_DD + 3


def test_directions_when_rows_come_in_pieces_then_are_those_of_all_rows_less_their_mean():
    x_ND = rows(300)
    known = PrincipalInputs(R, generator())
    for piece in x_ND.split([1, 2, 97, 200]):
        known.add(piece)
    known.add(x_ND[:0])
    exact_RD = torch.linalg.svd(x_ND - x_ND.mean(dim=0), full_matrices=False).Vh[:R]
    found_RD = known.directions_RD
    torch.testing.assert_close(found_RD.t() @ found_RD, exact_RD.t() @ exact_RD, rtol=0, atol=2e-2)
    torch.testing.assert_close(found_RD @ found_RD.t(), torch.eye(R), rtol=0, atol=1e-5)


def test_directions_when_the_same_rows_come_again_then_have_converged():
    x_ND = rows(300)
    known = PrincipalInputs(R, generator())
    known.add(x_ND)
    assert known.cosine == 0
    known.add(-x_ND.flip(0) + 2 * x_ND.mean(dim=0))
    assert known.cosine > 0.99
    known.add(100 * torch.randn(300, D))
    assert known.cosine < 0.99


def test_directions_when_rows_are_few_or_alike_then_are_no_more_than_they_have():
    known = PrincipalInputs(R, generator())
    known.add(rows(1))
    assert len(known.directions_RD) == 0
    known = PrincipalInputs(R, generator())
    known.add(rows(3).repeat(5, 1))
    assert len(known.directions_RD) == 2
