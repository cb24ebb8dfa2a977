"""Between processes of GPUs that NCCL does not serve: two on one GPU, or a torch without it.

gloo sends what is in the machine's memory. So a tensor is copied there on a stream of its own, and a thread hands it
over when it has arrived: neither computing nor whoever asks waits for that. What is received is copied to the GPU in
the same way.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from weft.kernels.device import CPU, Stream, has_streams, host_memory, mark, on_stream, wait_for
from weft.parallel.stages.transport import Channel, TorchTransport


class HostTransport(TorchTransport):
    """Through pinned memory."""

    def __init__(
        self, stage: int, device: torch.device, longest_wait: datetime.timedelta, tensor: int = 0, num_tensor: int = 1
    ) -> None:
        """All processes of the default group, which is gloo's, make theirs at the same time."""
        super().__init__(stage, CPU, longest_wait, tensor, num_tensor)
        self._gpu = device
        self._out, self._in = (Stream(device) if has_streams(device) else None for _ in range(2))
        # What one stage computes is ready in the order of its stream, so one thread is enough to wait for it.
        self._thread = ThreadPoolExecutor(1, "weft-send")
        self._handed: list[Future[None]] = []

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Starts to copy it."""
        ready = mark(tensor.device)
        with nullcontext() if self._out is None else on_stream(self._out):
            wait_for(tensor, ready)
            host = host_memory(tensor.shape, tensor.dtype, self._gpu)
            host.copy_(tensor, non_blocking=True)
            copied = mark(self._gpu)
        self._handed = [handed for handed in self._handed if not handed.done()]
        self._handed.append(self._thread.submit(self._hand_over, host, copied, to_stage, channel))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel) -> torch.Tensor:
        """Waits until it is in the machine's memory; what is launched from now on waits for its way to the GPU."""
        host = super().receive(shape, dtype, from_stage, channel)
        with nullcontext() if self._in is None else on_stream(self._in):
            tensor = host.to(self._gpu, non_blocking=True)
            ready = mark(self._gpu)
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Waits for the other side to take it."""
        for handed in self._handed:
            handed.result()
        self._handed.clear()
        super().finish()

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return host_memory(shape, dtype, self._gpu)

    def _hand_over(self, host: torch.Tensor, copied: Any, to_stage: int, channel: Channel) -> None:
        if copied is not None:
            copied.synchronize()
        super().send(host, to_stage, channel)
