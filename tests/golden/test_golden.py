"""No bit of any result is other than it was when it was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import CASES
from golden_digests import Digests, digests_of, environment, recorded
from golden_runs import at_place

HERE = environment()
EXPECTED = recorded().get(HERE)
TWICE = ("ranks-together", "llama-fused", "resumed", "nf4-fused")
"""What is run twice on a machine whose bits nobody has recorded."""
UNKNOWN = (
    f"no bits are recorded for this environment ({HERE}), so they were only compared with those of a second run; to "
    "record them, check out a version whose bits are right and run: python tests/golden/record.py"
)


def digests(name: str, place: Path) -> Digests:
    place.mkdir()
    with at_place(place):
        return digests_of(CASES[name]())


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
        assert changes(digests(name, tmp_path / "run"), EXPECTED[name]) == []

    def test_record_when_read_then_holds_nothing_else():
        assert set(EXPECTED) == set(CASES)

else:

    @pytest.mark.parametrize("name", TWICE)
    def test_run_when_nothing_is_recorded_for_this_environment_then_a_second_run_has_the_same_bits(name, tmp_path):
        assert changes(digests(name, tmp_path / "first"), digests(name, tmp_path / "second")) == [], UNKNOWN
