"""No bit of any result differs from what was recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from golden_baseline import NoBaselineError, baseline, expected_digests
from golden_cases import CASES, resume_run_of_0_1_0, run_of_0_1_0
from golden_digests import Digests, Record, digests_of, environment
from golden_runs import Folders, in_golden_directory
from safetensors.torch import load_file

ALWAYS_COMPARED = "ranks-together"
"""Run with the recorded commit's code on every machine, so that the comparison itself is tested everywhere."""


def without_baseline(problem: NoBaselineError) -> None:
    """Fails where tests must be complete; elsewhere, as in an archive without history, names what was not compared."""
    message = f"no bits are recorded for {environment()}, and the recorded commit cannot be run: {problem}"
    pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    return Path(str(pytestconfig.cache.mkdir("golden")))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def expected(cache: Path) -> dict[str, Digests]:
    try:
        return expected_digests(list(CASES), cache)
    except NoBaselineError as problem:
        without_baseline(problem)
        raise


def changes(found: Digests, expected: Digests) -> list[str]:
    """Which part of which job differs."""
    return sorted(
        f"{job}: {part}"
        for job in found.keys() | expected.keys()
        for part in found.get(job, {}).keys() | expected.get(job, {}).keys()
        if found.get(job, {}).get(part) != expected.get(job, {}).get(part)
    )


@pytest.mark.parametrize("name", CASES)
def test_run_when_repeated_then_every_bit_is_as_recorded(name, expected, tmp_path):
    with in_golden_directory(tmp_path):
        assert changes(digests_of(CASES[name]()), expected[name]) == []


def test_recorded_commit_when_run_here_then_gives_the_expected_bits(cache, expected):
    try:
        found = baseline(Record.read().commit, [ALWAYS_COMPARED], cache)
    except NoBaselineError as problem:
        without_baseline(problem)
    assert changes(found[ALWAYS_COMPARED], expected[ALWAYS_COMPARED]) == []


def test_run_of_version_0_1_0_when_resumed_then_ends_about_as_if_never_stopped(tmp_path):
    """About: its first half has the bits of the machine it was begun on."""
    whole, resumed = (weights(case, tmp_path / case.__name__) for case in (run_of_0_1_0, resume_run_of_0_1_0))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert (resumed[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), name


def test_record_when_read_then_holds_no_case_that_is_gone():
    for kind, cases in Record.read().environments.items():
        assert set(cases) <= set(CASES), kind


def weights(case, folder: Path) -> dict:
    """All adapters of a run, by job and tensor."""
    folder.mkdir()
    with in_golden_directory(folder):
        found: Folders = case()
        files = {job: load_file(path / "adapter" / "adapter_model.safetensors") for job, path in found.items()}
    return {f"{job}: {name}": tensor for job, tensors in files.items() for name, tensor in tensors.items()}
