"""The hardware table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.plan.cost.hardware import DEVICES, find_hardware


@pytest.mark.parametrize(
    ("called", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("A100", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("cpu", "cpu"),
        ("CPU (x86_64)", "cpu"),
    ],
)
def test_find_hardware_when_a_driver_names_it_then_finds_its_row(called, row):
    assert find_hardware(called) is DEVICES[row]


def test_find_hardware_when_unknown_then_lists_the_known_devices():
    with pytest.raises(ConfigError, match=r"no device 'tpu-v5' in the table; it has h200, h100.*`weft profile`"):
        find_hardware("tpu-v5")


@pytest.mark.parametrize(
    ("name", "meant"), [("a100-41", "a100-40"), ("h2000", "h200"), ("h100x", "h100"), ("l40sx", "l40s")]
)
def test_find_hardware_when_almost_right_then_suggests_a_device_instead_of_taking_it(name, meant):
    with pytest.raises(ConfigError, match=rf"no device '{name}' in the table; it has h200.*Did you mean {meant}"):
        find_hardware(name)


def test_h200_when_read_then_has_the_measured_rates():
    device = DEVICES["h200"]
    assert device.product_flop == pytest.approx(739e12)
    assert device.fp8_flop == pytest.approx(1433e12)
    assert all(row.memory_bytes > 0 and row.link_rate > 0 for row in DEVICES.values())


def test_links_when_measured_then_they_replace_the_assumed_ones_and_a_damaged_file_does_not(tmp_path):
    file, assumed = tmp_path / "links.json", DEVICES["cpu"]
    assert assumed.with_links("cpu", file) is assumed
    for text in ("{", "[]", '{"cpu": {"bytes_per_s": 0, "latency_s": 0}}', '{"cpu": {"bytes_per_s": 1e9}}'):
        file.write_text(text)
        assert assumed.with_links("cpu", file) is assumed
    file.write_text(json.dumps({"cpu": {"bytes_per_s": 2e9, "latency_s": 1e-4}}))
    measured = assumed.with_links("cpu", file)
    assert measured == replace(assumed, link_rate=2e9, link_s=1e-4, links="measured")
    assert measured.send_s(2e9) == 1.0001
