"""Which GPU each process of a layout has, and by what they talk to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.errors import ConfigError
from weft.gpu_choice import VISIBLE, choose_gpus, visible_gpus
from weft.kernels.device import is_cpu
from weft.model.resolve import ResolvedModel

WHERE = "--devices"
LOOPBACKS = ("lo", "lo0")
"""What systems call the way from a machine to itself."""


def find_gpus(model: ResolvedModel, num_devices: int, chosen: str | None) -> tuple[str, ...]:
    """The GPU of each process, by the name that CUDA knows it by; none on a CPU. ConfigError for more than there are.

    `chosen`: numbers of GPUs, one for each process; a GPU that is named twice has two, which is for tests.
    """
    if model.is_cpu:
        if chosen is not None:
            raise ConfigError("are for GPUs, and this run is on a CPU; leave them out.", where=WHERE)
        return ()
    gpus = choose_gpus(chosen, visible_gpus())
    if chosen is not None and len(gpus) != num_devices:
        found = f"got {chosen}, which names {len(gpus)}; the layout has {num_devices} devices, so name one for each."
        raise ConfigError(found, where=WHERE)
    if num_devices > len(gpus):
        there = "there is 1 GPU" if len(gpus) == 1 else f"there are {len(gpus)} GPUs"
        found = f"takes {num_devices} GPUs, and {there}; use a layout of at most {len(gpus)}"
        raise ConfigError(f"{found}, or to try it out put several on one with {WHERE}.", where="--layout")
    return tuple(gpus[:num_devices])


def choose_backend(gpus: Sequence[str]) -> str:
    """NCCL where every process has a GPU of its own; it refuses two on one. Else gloo."""
    has_own = len({*gpus}) == len(gpus) > 0
    return "nccl" if has_own and dist.is_nccl_available() else "gloo"


def process_variables(gpu: str | None) -> dict[str, str]:
    """The environment of a process: it sees its own GPU alone, and gloo listens to nobody but this machine.

    By itself gloo would look for the machine's name, which takes long where there is no network to ask.
    """
    loopbacks = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    own = {} if gpu is None else {VISIBLE: gpu}
    return {**({"GLOO_SOCKET_IFNAME": loopbacks[0]} if loopbacks else {}), **os.environ, **own}


def goes_through_host(device: torch.device, backend: str) -> bool:
    """Whether tensors have to be brought to the machine's memory to be sent."""
    return backend == "gloo" and not is_cpu(device)
