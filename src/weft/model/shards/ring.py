"""Two buffers in which the layers of a model come and go: one is worked on while the next is gathered.

A layer's weights read the buffer of its parity for ever, so nothing is pointed elsewhere as a microbatch passes, and a
captured graph finds the same addresses. A microbatch goes through all layers, 0 to L - 1, and back again if anything
learns from it, at once or when others have passed; its ways are the same on all devices, whether they have samples or
not, since each gives its slices to the others:
    begin(back)   the first two layers of the way are here: 0 and 1, or the last ones on the way back
    use(i)        waits for layer i, and starts to gather the one behind it over the one before it
    end(then)     goes the rest of the way for the others' sake: gradients need not go back to the first layer. Then
                  those come with which the next way begins, as far as they are not here
Forward and at once back that is 2 (L - 2) gathers a microbatch: at the turning point both layers are still here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.model.shards.flat_layer import FlatLayer
from weft.model.shards.peers import Peers, PendingGather

NUM_BUFFERS = 2


class LayerRing:
    """The layers of a model whose frozen weights are here only while they are needed."""

    def __init__(self, layers: Sequence[FlatLayer], slices: Sequence[torch.Tensor], peers: Peers) -> None:
        """`slices`: what this device keeps of each layer. The weights of the layers lie in the buffers from now on."""
        self._peers = peers
        self._slices = list(slices)
        self._sizes = [layer.padded_bytes(peers.count) for layer in layers]
        self._buffers = [
            torch.zeros(max(self._sizes[parity::NUM_BUFFERS], default=0), dtype=torch.uint8, device=slices[0].device)
            for parity in range(NUM_BUFFERS)
        ]
        self._held: list[int | None] = [None] * NUM_BUFFERS
        """The layer in each buffer, or on its way there."""
        self._arriving: list[PendingGather | None] = [None] * NUM_BUFFERS
        self._way: deque[int] = deque()
        """Layers that the microbatch has still to pass."""
        self._is_back_next: bool | None = None
        """Whether the next way is one back, if somebody knows."""
        for index, layer in enumerate(layers):
            layer.lie_in(self._buffer(index))

    @property
    def num_bytes(self) -> int:
        """Memory of slices and buffers."""
        return sum(len(own) for own in (*self._slices, *self._buffers))

    @property
    def gathered_bytes(self) -> int:
        """What comes from other devices on a way there and back."""
        whole = sum(self._sizes[NUM_BUFFERS:]) + sum(self._sizes[:-NUM_BUFFERS])
        return whole - whole // self._peers.count

    @property
    def can_be_recorded(self) -> bool:
        """Whether a way may be part of a captured graph."""
        return self._peers.can_be_recorded

    def begin(self, *, back: bool) -> None:
        """A microbatch sets out forward, or back."""
        assert not self._way, "one microbatch is under way at a time"
        self._way.extend(self._layers(back=back))
        self._start_first(back=back)
        for layer in self._layers(back=back)[:NUM_BUFFERS]:
            self._arrive(layer)

    def use(self, layer: int) -> None:
        """The microbatch comes to a layer, whose weights are here when this returns."""
        assert self._way and self._way[0] == layer, f"layer {layer} is not the next of {list(self._way)}"
        self._way.popleft()
        self._arrive(layer)
        following = next((other for other in self._way if other != layer), None)
        if following is not None:
            self._start(following)

    def end(self, *, then_back: bool) -> None:
        """The microbatch has gone as far as it had to; `then_back`: the next way is one back, as far as it knows."""
        while self._way:
            self.use(self._way[0])
        self._start_first(back=then_back if self._is_back_next is None else self._is_back_next)

    @contextmanager
    def before(self, *, back: bool) -> Iterator[None]:
        """In this context a way ends that is followed by one forward, or back; all devices say the same."""
        self._is_back_next = back
        try:
            yield
        finally:
            self._is_back_next = None

    def run_empty_pass(self, *, back: bool, then_back: bool = False) -> None:
        """A way without samples: others need what this device holds."""
        self.begin(back=back)
        self.end(then_back=then_back)

    def most(self, number: int) -> int:
        """The largest number that any device gives, such as how many microbatches it has."""
        return self._peers.most(number)

    def holds(self, layer: int) -> bool:
        """Whether a layer's weights are here now."""
        place = layer % NUM_BUFFERS
        return self._held[place] == layer and self._arriving[place] is None

    def went(self, *, back: bool) -> None:
        """A captured graph has taken the way forward, or back, by itself."""
        self._way.clear()
        for layer in self._layers(back=not back)[:NUM_BUFFERS]:
            self._held[layer % NUM_BUFFERS] = layer

    def forget(self) -> None:
        """Lets go of a microbatch that failed on its way."""
        for layer in self._held:
            if layer is not None:
                self._arrive(layer)
        self._way.clear()

    def restart(self) -> None:
        """Takes nothing to be here: all devices have met anew, and what was on its way may never have come."""
        self._held, self._arriving = [None] * NUM_BUFFERS, [None] * NUM_BUFFERS
        self._way.clear()

    def _layers(self, *, back: bool) -> range:
        """In the order of a way."""
        layers = range(len(self._slices))
        return layers[::-1] if back else layers

    def _start_first(self, *, back: bool) -> None:
        for layer in self._layers(back=back)[:NUM_BUFFERS]:
            self._start(layer)

    def _start(self, layer: int) -> None:
        place = layer % NUM_BUFFERS
        if self._held[place] != layer:
            assert self._arriving[place] is None, "what comes is used before another takes its place"
            self._held[place] = layer
            self._arriving[place] = self._peers.gather(layer, self._slices[layer], self._buffer(layer))

    def _arrive(self, layer: int) -> None:
        place = layer % NUM_BUFFERS
        arriving, self._arriving[place] = self._arriving[place], None
        if arriving is not None:
            arriving.wait()

    def _buffer(self, layer: int) -> torch.Tensor:
        return self._buffers[layer % NUM_BUFFERS][: self._sizes[layer]]
