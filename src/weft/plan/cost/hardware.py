"""Sustained rates of devices: products, memory, links. A start until `weft profile` has measured the device itself.

The H200's rates were measured (8192³ products in bf16 739 and in FP8 1,433 TFLOP/s, 2026-11, torch 2.11); those of
other GPUs are their published peaks times the H200's shares (0.747 and 0.724). Memory and links count with a fixed
share of their published peaks, links until `weft doctor --layouts` has measured those of a machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import ConfigError, did_you_mean

PRODUCT_SHARE = 739 / 989.5
"""Share of the published bf16 peak in one large product."""
FP8_SHARE = 1433 / 1979
MEMORY_SHARE = 0.85
LINK_SHARE = 0.8
GB, TFLOP = 1e9, 1e12


@dataclass(frozen=True)
class Hardware:
    """One kind of device, with rates that it sustains."""

    name: str
    product_flop: float
    """FLOP per second of matrix products in the activations' type: bf16, on a CPU fp32."""
    fp8_flop: float | None
    """FLOP per second of FP8 products; None: FP8 weights are made dense before products."""
    memory_rate: float
    """Bytes per second that are read or written."""
    memory_bytes: int
    link_rate: float
    """Bytes per second to a neighbour in the same machine, one way."""
    network_rate: float
    """Bytes per second to another machine, one way."""
    link_s: float = 0.0
    """Seconds before a message's first byte arrives."""
    links: str = "assumed"
    """Origin of `link_rate` and `network_rate`, in a word for the user."""
    launch_s: float = 4e-6
    """Gap between kernels of a captured graph; on a CPU, between operations."""
    activation_bytes: int = 2

    def send_s(self, num_bytes: float) -> float:
        return self.link_s + num_bytes / self.link_rate

    def with_links(self, name: str, file: Path) -> Hardware:
        """This device with the links that a file has measured for its machine, if any."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))[name]
            rate, wait_s = float(found["bytes_per_s"]), float(found["latency_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return self
        if not (0 < rate < float("inf") and 0 <= wait_s < float("inf")):
            return self
        return replace(self, link_rate=rate, link_s=wait_s, links="measured")


def _gpu(
    name: str, bf16: float, fp8: float | None, memory: float, size_gib: float, link: float, network: float = 50.0
) -> Hardware:
    """A device from published peaks in TFLOP/s, GB/s and GiB."""
    return Hardware(
        name,
        bf16 * TFLOP * PRODUCT_SHARE,
        None if fp8 is None else fp8 * TFLOP * FP8_SHARE,
        memory * GB * MEMORY_SHARE,
        int(size_gib * 2**30),
        link * GB * LINK_SHARE,
        network * GB * LINK_SHARE,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("h200", 989.5, 1979, 4800, 139.8, 450),
        _gpu("h100", 989.5, 1979, 3350, 79.1, 450),
        _gpu("a100-80", 312, None, 2039, 79.2, 300, 25),
        _gpu("a100-40", 312, None, 1555, 39.4, 300, 25),
        _gpu("l40s", 362, 733, 864, 44.5, 32, 25),
        _gpu("rtx-4090", 165.2, 330.3, 1008, 23.6, 32, 12.5),
        # One core of a server at fp32; a few of them share what memory there is.
        Hardware("cpu", 5e10, None, 1e10, 16 * 2**30, 1e10, 1e9, launch_s=2e-5, activation_bytes=4),
    )
}
_MARKS = (
    (r"\bg?h200\b", "h200"),
    (r"\b(h100|h800)\b", "h100"),
    (r"\ba(100|800)\b.*\b80|\b80.*\ba(100|800)\b", "a100-80"),
    (r"\ba(100|800)\b(.*\b40|(?!.*\d\d))", "a100-40"),
    (r"\bl40s?\b", "l40s"),
    (r"\b4090\b", "rtx-4090"),
    (r"\bcpu\b", "cpu"),
)
"""Pairs of a pattern of a driver's name and a row's name; the first match counts."""


def find_hardware(name: str) -> Hardware:
    """The row of a device, by its name here or by its driver's, e.g. `NVIDIA H200`."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    for mark, found in _MARKS:
        if re.search(mark, name.lower()):
            return DEVICES[found]
    raise ConfigError(
        f"there is no device {name!r} in the table; it has {', '.join(DEVICES)}.",
        where="device",
        hint=did_you_mean(name, DEVICES) or "`weft profile` measures the one at hand.",
    )
