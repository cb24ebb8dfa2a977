"""What one of several devices has of a place where adapters sit.

The frozen weight W (O, D) of a linear is divided by its outputs or by its inputs. An adapter's parameters stay whole
on every device; what a slot computes with is the part of them that belongs to the device's outputs or inputs, and it
leaves gradients in that part alone (LoRA: all of A and some rows of B, or some columns of A and all of B). All methods
that we divide are linear in what is divided, so the devices' gradients add up to the whole's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from weft.adapters.devices import Devices

Side = Literal["outputs", "inputs"]
"""By what the linears of a model are divided over devices."""


@dataclass(frozen=True)
class SiteShare:
    """The outputs and inputs of a place that are on this device."""

    outputs: slice
    inputs: slice
    devices: Devices | None = None
    """That have the other parts; None: what adapters do here, all devices do alike."""
    has_all_inputs: bool = True

    @classmethod
    def whole(cls, num_out: int, num_in: int) -> SiteShare:
        """A place that is not divided."""
        return cls(slice(0, num_out), slice(0, num_in))

    @classmethod
    def part(cls, num_out: int, num_in: int, side: Side, devices: Devices) -> SiteShare:
        """This device's run of the outputs or inputs of a linear."""
        num_all = num_out if side == "outputs" else num_in
        assert num_all % devices.count == 0, "checked before anything was loaded"
        size = num_all // devices.count
        own = slice(devices.index * size, (devices.index + 1) * size)
        if side == "outputs":
            return cls(own, slice(0, num_in), devices)
        return cls(slice(0, num_out), own, devices, has_all_inputs=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of what is here."""
        return self.outputs.stop - self.outputs.start, self.inputs.stop - self.inputs.start

    @property
    def adds_once(self) -> bool:
        """Whether what is added to the result whatever the number of devices, such as a bias, is added here."""
        return self.has_all_inputs or self.devices is None or self.devices.index == 0

    def view(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The part of an adapter's tensor that belongs here: a view of this shape."""
        start = self.outputs.start if self.has_all_inputs else self.inputs.start
        for dim, size in enumerate(shape):
            if tensor.shape[dim] != size:
                tensor = tensor.narrow(dim, start, size)
        return tensor

    def over_inputs(self, part: torch.Tensor) -> torch.Tensor:
        """What is found from all inputs, given what is found from those here and adds up."""
        return part if self.has_all_inputs or self.devices is None else self.devices.add_up(part)

    def joined(self, weight_OD: torch.Tensor) -> torch.Tensor:
        """The frozen weight of the whole place; all devices ask at once."""
        if self.devices is None:
            return weight_OD
        return torch.cat(self.devices.gather(weight_OD.contiguous()), dim=0 if self.has_all_inputs else 1)
