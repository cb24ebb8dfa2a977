"""The table of figures, and the arithmetic that makes a figure of two runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.clock import Measured
from benchmarks.figures import Kind
from benchmarks.kernels import CASES
from benchmarks.steps.regimes import (
    FOUR,
    MAIN_SHAPE,
    MIXED_RANKS,
    REGIMES,
    BenchProgram,
    BenchRun,
    Regime,
    choose,
    packed_samples,
    padded_batch,
    regimes_of,
)
from benchmarks.steps.session import figure, seconds_per_token
from weft.errors import ConfigError
from weft.plan.cost.shape import SHAPES

WANTED = {
    "step_bf16_vs_peft",
    "step_bf16_vs_liger",
    "step_fp8_vs_peft",
    "step_fp8_vs_liger",
    "sweep16_bf16",
    "sweep16_fp8",
    "sweep32",
    "sweep32_tiny",
    "sweep32_3b",
    "sweep32_8b",
    "linear4_p0",
    "linear4_p10",
    "linear4_r64",
    "linear32_mixed",
    "overhead4",
    "overhead32",
    "peak_gb_8192",
    "tiny16",
    "tiny4",
    "fits_70b_tok_s",
}
OURS, PEER = BenchRun(BenchProgram.WEFT, FOUR), BenchRun(BenchProgram.PEFT_BEST, FOUR)
SLOW, FAST = Measured(1000, 1200, 2.0, 90.0), Measured(4000, 4096, 1.6, 40.0)


def test_table_when_read_then_has_every_promised_figure_with_its_target():
    found = {regime.key: regime for regimes in REGIMES.values() for regime in regimes}
    assert found.keys() | CASES.keys() >= WANTED
    assert all(found[key].target is not None for key in WANTED & found.keys())


def test_names_of_runs_when_shapes_share_a_file_then_are_unique():
    for shape in REGIMES:
        runs = {run for regime in regimes_of(shape) for run in regime.runs}
        assert len({run.key for run in runs}) == len(runs)


def test_regimes_when_a_shape_has_no_targets_then_keys_carry_its_name():
    regimes = regimes_of("qwen2.5-7b")
    assert [r.key for r in regimes][:2] == ["qwen2.5-7b.step_bf16_vs_peft", "qwen2.5-7b.step_bf16_vs_liger"]
    assert {r.target for r in regimes} == {None}


def test_choose_when_names_are_given_then_only_their_shapes_are_built():
    assert {s: [r.key for r in rs] for s, rs in choose([], ["tiny16"]).items()} == {"tinyllama-1.1b": ["tiny16"]}
    assert "tiny" not in choose([], [])
    with pytest.raises(ConfigError, match=r"no regime 'tiny17' on tinyllama-1.1b.*Did you mean tiny16\?"):
        choose(["tinyllama-1.1b"], ["tiny17"])


@pytest.mark.parametrize(
    ("kind", "target", "value", "is_met"),
    [
        (Kind.SPEEDUP, 5.0, 5.0, True),  # 2,500 over 500 tokens/s
        (Kind.SPEEDUP, 5.1, 5.0, False),
        (Kind.PEAK_GB, 45.0, 40.0, True),
        (Kind.PEAK_GB, 39.0, 40.0, False),
        (Kind.TOKENS_PER_S, 4.9, 2500.0, True),  # of the peer's 500
        (Kind.TOKENS_PER_S, 5.1, 2500.0, False),
        (Kind.SPEEDUP, None, 5.0, None),
    ],
)
def test_figure_when_both_runs_are_there_then_counts_real_tokens(kind, target, value, is_met):
    found = figure(Regime("key", OURS, kind, PEER, target), {OURS: FAST, PEER: SLOW})
    assert found is not None
    assert found.value == pytest.approx(value)
    assert found.is_met is is_met


@pytest.mark.parametrize(
    ("overhead", "text"), [(0.05, "+5.0% (target ≤ +6.0%, met)"), (4.0, "+400.0% (target ≤ +6.0%, NOT met)")]
)
def test_overhead_when_both_were_timed_in_turn_then_that_counts(overhead, text):
    """Not the ratio of two runs at different times."""
    frozen = replace(FAST, extra={"overhead": overhead})
    found = figure(Regime("key", OURS, Kind.OVERHEAD, PEER, 0.06), {OURS: SLOW, PEER: frozen})
    assert found is not None
    assert found.value == overhead
    assert found.is_met is (overhead < 0.06)
    assert found.line == f"key = {text}"


def test_figure_when_a_run_is_missing_then_waits():
    assert figure(Regime("key", OURS, Kind.SPEEDUP, PEER, 2.0), {OURS: FAST}) is None


@pytest.mark.parametrize("shape", REGIMES)
def test_samples_when_packed_then_fill_the_microbatch_and_serve_every_job(shape):
    for regime in REGIMES[shape]:
        workload = regime.ours.workload
        jobs = packed_samples(workload, 100)
        lengths = [sample.length for samples in jobs for sample in samples]
        assert len(jobs) == len(workload.ranks)
        assert all(jobs)
        assert workload.capacity - workload.lengths[0] < sum(lengths) <= workload.capacity
        assert workload.lengths[0] <= min(lengths)
        assert max(lengths) <= workload.lengths[1]


def test_sweep_of_32_when_packed_then_every_configuration_has_a_batch_of_one_and_peft_the_same_lengths():
    found = {regime.key: (shape, regime) for shape, regimes in REGIMES.items() for regime in regimes}
    wanted = {"sweep32_tiny": ("tinyllama-1.1b", 40), "sweep32_3b": ("qwen2.5-3b", 20), "sweep32_8b": (MAIN_SHAPE, 10)}
    for key, (shape, target) in wanted.items():
        where, regime = found[key]
        assert (where, regime.target) == (shape, target)
        assert regime.peer is not None and regime.peer.program is BenchProgram.PEFT_SOLO
        assert regime.peer.workload == regime.ours.workload
        workload = regime.ours.workload
        assert workload.lengths == (256, 512) and workload.ranks == (8, 16, 32, 64) * 8
        assert [len(samples) for samples in packed_samples(workload, 100)] == [1] * 32


def test_mixed_ranks_when_read_then_are_32_from_8_to_256():
    assert (len(MIXED_RANKS), min(MIXED_RANKS), max(MIXED_RANKS)) == (32, 8, 256)


def test_padded_batch_when_lengths_differ_then_only_real_tokens_count():
    batch, real = padded_batch((5, 9), 6, 0, 50, torch.device("cpu"))
    mask = batch["attention_mask"].bool()
    assert int(mask.sum()) == real < mask.numel()
    assert (batch["labels"] == -100).equal(~mask)
    assert mask.any(1).all() and mask[:, :5].all() and mask[:, -1].any()
    assert "attention_mask" not in padded_batch((8, 8), 2, 0, 50, torch.device("cpu"))[0]


def test_roofline_when_computed_by_hand_then_agrees():
    # 70 B shape at 1,433 and 739 TFLOP/s: 2 · 69.5e9 FLOP each way per token.
    assert 1 / seconds_per_token(SHAPES["llama-3.1-70b"], 1433e12, 739e12) == pytest.approx(3508, rel=0.01)
