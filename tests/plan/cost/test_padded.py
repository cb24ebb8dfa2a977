"""LobRA's time of padded batches, on its published measurements."""

from __future__ import annotations

import pytest

from benchmarks.deploy.published import LAYERS_7B, TABLE_11, padded_layer_s
from weft.errors import ConfigError
from weft.plan.cost.fit import FitError, PaddedBatch, PaddedTime, fit_padded


def rows_of(degree: int) -> list[tuple[int, int, int, int, float]]:
    return [row for row in TABLE_11 if row[0] == degree]


def batch(row: tuple[int, int, int, int, float]) -> PaddedBatch:
    _, stages, length, count, seconds = row
    return PaddedBatch(1, length, (count + stages - 1) * LAYERS_7B / stages, seconds)


def error_of(found: PaddedTime, rows: list[tuple[int, int, int, int, float]]) -> FitError:
    predicted = [
        padded_layer_s(found, 1, length) * (count + stages - 1) * LAYERS_7B / stages
        for _, stages, length, count, _ in rows
    ]
    return FitError.of(predicted, [row[-1] for row in rows])


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_fit_padded_when_given_table_11_then_meets_every_row_of_a_degree(degree):
    rows = rows_of(degree)
    found = error_of(fit_padded([batch(row) for row in rows]), rows)
    assert found.mape < 0.04 and found.p95 < 0.09


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_fit_padded_when_the_deepest_pipeline_was_not_seen_then_meets_it(degree):
    """Fitted on shallower pipelines of the degree; LobRA reports its own predictions to be within a tenth."""
    deepest = max(row[1] for row in rows_of(degree))
    lengths = {row[2] for row in rows_of(degree) if row[1] < deepest}
    seen = [row for row in rows_of(degree) if row[1] < deepest]
    unseen = [row for row in rows_of(degree) if row[1] == deepest and row[2] in lengths]
    assert error_of(fit_padded([batch(row) for row in seen]), unseen).mape < 0.11


def test_fit_padded_when_batches_are_exact_then_finds_the_function():
    truth = PaddedTime((2e-12, 5e-11, 3e-8, 1e-7, 1e-6, 2e-5))
    sizes = [(b, s) for b in (1, 2, 4, 8) for s in (256, 512, 1024, 2048)]
    found = fit_padded([PaddedBatch(b, s, 32, 32 * padded_layer_s(truth, b, s)) for b, s in sizes])
    assert found.coefficients == pytest.approx(truth.coefficients, rel=1e-4)


def test_padded_when_input_makes_no_sense_then_refused():
    with pytest.raises(ConfigError, match="got no batches"):
        fit_padded([])
