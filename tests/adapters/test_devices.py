"""Sums over devices: the bits of a sum in their order, for what a ring would send."""

from __future__ import annotations

import pytest
import torch
from thread_devices import ThreadDevices, on_devices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_sum_when_added_up_by_parts_then_has_the_order_of_the_devices_and_sends_less(count, dtype):
    """In fp32 and from the first device on, whatever the shape and the strides."""
    torch.manual_seed(0)
    parts = [(10.0 ** (index % 5) * torch.randn(7, 25)).to(dtype).t() for index in range(count)]
    expected = torch.zeros(25, 7)
    for part in parts:
        expected += part.float()

    def run(devices: ThreadDevices) -> tuple[torch.Tensor, int]:
        return devices.add_up(parts[devices.index]), devices.num_received

    found = on_devices(count, run)
    assert all(torch.equal(total, expected.to(dtype)) for total, _ in found)
    # What is no multiple of the devices is filled up.
    each = -(-7 * 25 // count)
    assert {num for _, num in found} == {7 * 25 if count == 2 else 2 * (count - 1) * each}
