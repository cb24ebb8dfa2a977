"""No bit of any result is other than it was when it was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import CASES, Case, resume_run_of_0_1_0, run_of_0_1_0
from golden_digests import Digests, digests_of, environment, recorded
from golden_runs import at_place
from safetensors.torch import load_file

HERE = environment()
EXPECTED = recorded().get(HERE)
TWICE = ("ranks-together", "llama-fused", "resumed", "nf4-fused")
"""What is run twice on a machine whose bits nobody has recorded."""
UNKNOWN = (
    f"no bits are recorded for this environment ({HERE}), so they were only compared with those of a second run; to "
    "record them, check out a version whose bits are right and run: python tests/golden/record.py"
)


def digests(case: Case, place: Path) -> Digests:
    place.mkdir()
    with at_place(place):
        return digests_of(case())


def changes(found: Digests, expected: Digests) -> list[str]:
    """Which part of which job is other than expected."""
    return sorted(
        f"{job}: {part}"
        for job in found.keys() | expected.keys()
        for part in found.get(job, {}).keys() | expected.get(job, {}).keys()
        if found.get(job, {}).get(part) != expected.get(job, {}).get(part)
    )


if EXPECTED is not None:

    @pytest.mark.parametrize("name", CASES)
    def test_run_when_repeated_then_every_bit_is_as_recorded(name, tmp_path):
        assert name in EXPECTED, f"nothing is recorded of this run; python tests/golden/record.py {name} does"
        assert changes(digests(CASES[name], tmp_path / "run"), EXPECTED[name]) == []

    def test_run_of_version_0_1_0_when_resumed_then_ends_as_if_never_stopped(tmp_path):
        assert changes(digests(resume_run_of_0_1_0, tmp_path / "run"), EXPECTED["run-of-0-1-0"]) == []

    def test_record_when_read_then_holds_nothing_else():
        assert set(EXPECTED) == set(CASES)

else:

    @pytest.mark.parametrize("name", TWICE)
    def test_run_when_nothing_is_recorded_for_this_environment_then_a_second_run_has_the_same_bits(name, tmp_path):
        assert changes(digests(CASES[name], tmp_path / "first"), digests(CASES[name], tmp_path / "second")) == [], (
            UNKNOWN
        )

    def test_run_of_version_0_1_0_when_resumed_elsewhere_then_ends_about_as_if_never_stopped(tmp_path):
        """Its first half has the bits of the machine it was begun on."""
        whole, resumed = (weights(case, tmp_path / case.__name__) for case in (run_of_0_1_0, resume_run_of_0_1_0))
        assert whole.keys() == resumed.keys()
        for name, tensor in whole.items():
            assert (resumed[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), f"{name}; {UNKNOWN}"


def weights(case: Case, place: Path) -> dict[str, torch.Tensor]:
    """All adapters of a run, by job and tensor."""
    place.mkdir()
    with at_place(place):
        found = {job: load_file(folder / "adapter" / "adapter_model.safetensors") for job, folder in case().items()}
    return {f"{job}: {name}": tensor for job, tensors in found.items() for name, tensor in tensors.items()}
