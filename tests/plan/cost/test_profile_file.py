"""Profiles: fitted, stored, read again, and planned with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_fit import BYTES, SECONDS, noisy, random_loads

from weft.errors import ConfigError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.profile import Measurement, Profile, ProfiledCost, Setup, fit_profile, load_profile
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import CostModel

SETUP = Setup("NVIDIA H200", "llama-3.1-8b", 4096, 32, 218_103_808, 525_336_576, 81_920, 2, 64)
STEP = Fit({"fixed": 1e-5, "jobs": 5e-5, "parameters": 1e-11})


def synthetic(noise: float, count: int = 24) -> Profile:
    """A device whose truth is known, measured with some noise; every fourth measurement is held out."""
    loads = random_loads(count)
    columns = [
        noisy(SECONDS, loads, 10 * noise, 2),
        noisy(SECONDS, loads, 10 * noise, 3),
        noisy(STEP, loads, 10 * noise, 4),
        noisy(BYTES, loads, noise, 5),
        noisy(BYTES, loads, noise, 6),
    ]
    rows = zip(loads, *columns, strict=True)
    return fit_profile(SETUP, [Measurement(*row, held_out=index % 4 == 3) for index, row in enumerate(rows)])


def test_profile_when_measurements_are_noisy_then_held_out_memory_is_met_within_the_target():
    found = synthetic(0.001)
    assert found.errors["peak_bytes"].mape <= 0.0025
    assert found.errors["peak_bytes"].count == 6
    assert found.errors["forward_s"].mape < 0.05 and found.time_error.mape < 0.05
    assert found.margin == found.errors["reserved_bytes"].p95


def test_profile_when_held_out_measurements_differ_then_the_fits_do_not_see_them():
    found = synthetic(0.0)
    spoiled = [replace(m, peak_bytes=2 * m.peak_bytes) if m.held_out else m for m in found.measurements]
    again = fit_profile(SETUP, spoiled)
    assert again.fits == found.fits
    assert again.errors["peak_bytes"].mape == pytest.approx(0.5, abs=0.01)


def test_costs_when_what_a_job_adds_is_counted_apart_then_both_parts_are_the_whole():
    """Of a profile and of the table, over all stages, forward and backward, for any number of jobs in a microbatch."""
    profiled = ProfiledCost(synthetic(0.0), num_stages=2)
    table = AnalyticCost(ModelShape("small", 64, 128, 4, 4, 2, 16, 500), find_hardware("h200"), num_stages=2)
    for whole in (profiled, table):
        base, adapters = whole.apart()
        for num_jobs in (1, 3):
            together = both_s(replace(whole, num_jobs=num_jobs), [64] * 6)
            parts = both_s(base, [64] * 6) + 2 * 2 * adapters.microbatch_s(dict.fromkeys("abc"[:num_jobs], 64))
            assert parts == pytest.approx(together, rel=1e-9)
        assert adapters.job_s > 0


def both_s(cost: CostModel, lengths: list[int]) -> float:
    return sum(cost.forward_s(lengths, stage) + cost.backward_s(lengths, stage) for stage in range(2))


def test_profile_when_stored_and_read_then_the_same(tmp_path):
    found = synthetic(0.001)
    path = tmp_path / "h200.json"
    path.write_text(found.to_json())
    assert load_profile(path) == found


def damage(text: str, change) -> str:
    tree = json.loads(text)
    change(tree)
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.update(version=99), "has version 99; this Weft reads version 1."),
        (lambda t: t.pop("version"), "is no profile; `weft profile --out FILE` writes one."),
        (lambda t: t["fits"].pop("peak_bytes"), "is damaged: KeyError 'peak_bytes'"),
        (lambda t: t["fits"]["step_s"]["prices"].update(jobs=-1), "is damaged: ValueError -1 is not a number"),
        (lambda t: t["setup"].pop("hidden"), "is damaged: ValueError Setup has hidden amiss"),
        (lambda t: t["setup"].update(hidden="4096"), "is damaged: ValueError '4096' is not a number"),
        (lambda t: t["setup"].update(device=3), "is damaged: ValueError device is 3"),
        (lambda t: t.update(measurements=None), "is damaged: TypeError"),
        (lambda t: t["measurements"][0].update(held_out=1), "is damaged: ValueError held_out is 1"),
    ],
)
def test_load_profile_when_the_file_is_wrong_then_one_sentence_explains_why(tmp_path, change, sentence):
    path = tmp_path / "p.json"
    path.write_text(damage(synthetic(0.0).to_json(), change))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"--profile {path}: ")
    assert sentence in str(caught.value)


def test_load_profile_when_there_is_no_json_then_reports_it(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(tmp_path / "text.json")


def test_fit_profile_when_measurements_are_too_few_then_refused():
    found = synthetic(0.0)
    with pytest.raises(ConfigError, match="got 6 measurements to fit and 2 to check"):
        fit_profile(SETUP, found.measurements[:8])
    with pytest.raises(ConfigError, match="and 0 to check"):
        fit_profile(SETUP, [m for m in found.measurements if not m.held_out])


def test_profiled_cost_when_in_one_piece_then_is_the_fit():
    cost: CostModel = ProfiledCost(synthetic(0.0), rank=16, num_jobs=2)
    load = MicrobatchLoad.of([(16, [100, 300]), (16, [200])], 0, 64)
    assert cost.forward_s([100, 200, 300], 0) == pytest.approx(SECONDS.predict(load))
    assert cost.backward_s([100, 200, 300], 0) == pytest.approx(SECONDS.predict(load))
    assert cost.step_s(0) == pytest.approx(1e-5 + 5e-5 + 1e-11 * 16 * 81_920 * 32)
    assert cost.held_bytes([100, 200, 300], 0) == pytest.approx(640 * (3.1e6 + 450 * 16), rel=1e-4)
    assert cost.transfer_s(1000) == pytest.approx(1000 * 4096 * 2 / 360e9)


def test_profiled_cost_when_split_over_stages_then_the_sum_is_the_whole_and_the_head_is_last():
    found = synthetic(0.0)
    whole, parts = ProfiledCost(found), ProfiledCost(found, num_stages=4)
    lengths = [512, 256, 900]
    for name in ("forward_s", "backward_s", "held_bytes"):
        pieces = [getattr(parts, name)(lengths, stage) for stage in range(4)]
        assert sum(pieces) == pytest.approx(getattr(whole, name)(lengths, 0))
        assert pieces[0] == pieces[1] == pieces[2]
        assert (pieces[3] > pieces[2]) is (name != "held_bytes")
    assert parts.step_s(0) < whole.step_s(0)


def test_profiled_cost_when_the_microbatch_is_empty_then_costs_nothing():
    cost = ProfiledCost(synthetic(0.0))
    assert cost.forward_s([], 0) == cost.backward_s([], 0) == cost.held_bytes([], 0) == 0


def test_profiled_cost_when_the_device_is_unknown_then_transfers_take_a_plain_link():
    found = synthetic(0.0)
    other = replace(found, setup=replace(found.setup, device="Abacus 9"))
    assert ProfiledCost(other).transfer_s(1000) == pytest.approx(1000 * 8192 / 25e9)
    with pytest.raises(ConfigError, match="every stage needs a layer"):
        ProfiledCost(found, num_stages=33)
