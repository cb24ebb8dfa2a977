"""The kernel figures: right results have no error, wrong ones are refused."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import kernels
from benchmarks.clock import QUICK
from benchmarks.kernels import CASES, LinearCase, choose_cases, make_linear, measure_case, relative_errors
from weft.errors import ConfigError, JobError

CPU = torch.device("cpu")
CASE = LinearCase("two", (3, 8), 0.25, 1e9)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(21, 16, generator=generator), torch.randn(21, 24, generator=generator)


def nothing(out, *_, adds=True):
    """An operation that adds nothing."""
    if not adds:
        out.zero_()


def test_errors_when_the_path_is_right_then_are_rounding():
    linear = make_linear(CASE, 16, 24, 21, torch.float32, CPU)
    errors = relative_errors(linear, *inputs())
    assert errors.keys() == {"Y", "dX", "dA", "dB"}
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.parametrize(
    ("operation", "wrong"), [("expand", {"Y"}), ("expand_grad", {"dX"}), ("weight_grad", {"dA", "dB"})]
)
def test_errors_when_an_operation_does_nothing_then_show_it(operation, wrong, monkeypatch):
    monkeypatch.setattr(kernels, operation, nothing)
    errors = relative_errors(make_linear(CASE, 16, 24, 21, torch.float32, CPU), *inputs())
    assert {name for name, error in errors.items() if error > 1e-3} == wrong


def test_errors_when_a_result_is_nan_then_are_infinite():
    linear = make_linear(CASE, 16, 24, 21, torch.float32, CPU)
    x_TD, dy_TO = inputs()
    linear.jobs[1].entry.b_OP[0, 0] = math.nan
    assert relative_errors(linear, x_TD, dy_TO)["Y"] == math.inf


def test_case_when_measured_then_prints_each_size_and_takes_the_geometric_mean(monkeypatch):
    times = iter([[2.0, 1.0], [8.0, 1.0]])
    monkeypatch.setattr(kernels, "in_turn_s", lambda *_, **__: next(times))
    printed: list[str] = []
    figure = measure_case(CASE, CPU, torch.float32, QUICK, printed.append, [(16, 24)], [21, 42])
    assert figure.value == pytest.approx(4.0)
    assert [line.partition(":")[0] for line in printed] == ["two  16→24, 21 tokens", "two  16→24, 42 tokens"]
    assert "= 8.000; relative errors Y" in printed[1]


def test_case_when_timed_for_real_then_gives_a_positive_ratio():
    assert measure_case(CASE, CPU, torch.float32, QUICK, lambda _: None, [(16, 24)], [21]).value > 0


def test_case_when_the_result_is_wrong_then_gives_no_figure(monkeypatch):
    monkeypatch.setattr(kernels, "expand", nothing)
    with pytest.raises(JobError, match="two: the result is wrong: relative error"):
        measure_case(CASE, CPU, torch.float32, QUICK, lambda _: None, [(16, 24)], [21])


def test_choose_cases_when_misspelt_then_suggests():
    assert [case.key for case in choose_cases([])] == list(CASES)
    assert [case.key for case in choose_cases(["linear4_r64"])] == ["linear4_r64"]
    with pytest.raises(ConfigError, match=r"'linear4_r65'.*Did you mean linear4_r64\?"):
        choose_cases(["linear4_r65"])
