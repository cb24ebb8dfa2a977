"""What answers prompts: a backbone in this process, or one that is divided over others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from weft.engine.execute.memory import release_memory
from weft.engine.inference.adapter_slots import SlotAdapter, SlotReplica, host_adapter
from weft.engine.inference.attach import StoredAdapter
from weft.engine.inference.generate import (
    Continuation,
    Passes,
    Request,
    Written,
    end_tokens,
    most_at_once,
    text_of,
)
from weft.engine.inference.read import read_ahead
from weft.kernels.device import (
    allocated_bytes,
    empty_cache,
    free_and_total_bytes,
    is_gpu,
    memory_errors,
    memory_share,
    reserved_bytes,
    total_bytes,
)
from weft.model.backbone import Backbone
from weft.plan.admit import MARGIN
from weft.process_memory import memory_bytes


class TokenPasses(Protocol):
    """As `Passes`."""

    def advance(self, going: Sequence[Continuation]) -> Written: ...

    def finish(self) -> Written: ...

    def scores_at_end(self, item: Continuation) -> bool: ...


class PromptReplica(SlotReplica, Protocol):
    """Only the thread that trains calls it, except for `prepare`."""

    tokenizer: Any
    vocabulary: int
    max_positions: int

    @property
    def ends(self) -> Collection[int]:
        """Tokens that end an answer."""

    @property
    def passes(self) -> TokenPasses: ...

    @property
    def most_at_once(self) -> int:
        """The most sequences of a pass."""

    def prepare(self, stored: StoredAdapter) -> SlotAdapter:
        """AdapterFileError if an adapter does not fit the backbone or cannot write; for any thread."""

    def wait(self) -> None:
        """Waits for what training has started."""

    def read_ahead(self, item: Continuation, num_tokens: int) -> None:
        """Reads the first of the new tokens and writes nothing."""

    def text_of(self, request: Request) -> Callable[[Sequence[int]], str]: ...

    def release_memory(self) -> None: ...


class LocalPrompts:
    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.passes = Passes(backbone)
        self.tokenizer: Any = backbone.tokenizer
        self.vocabulary, self.max_positions = backbone.vocabulary, backbone.max_positions
        self.ends = end_tokens(backbone)
        device = backbone.device
        self.memory_bytes = int(total_bytes(device) * memory_share(device)) if is_gpu(device) else memory_bytes()

    @property
    def most_at_once(self) -> int:
        return most_at_once(self._backbone)

    def prepare(self, stored: StoredAdapter) -> SlotAdapter:
        return host_adapter(self._backbone, stored)

    def wait(self) -> None:
        self._backbone.wait()

    def read_ahead(self, item: Continuation, num_tokens: int) -> None:
        read_ahead(self._backbone, item, num_tokens)

    def text_of(self, request: Request) -> Callable[[Sequence[int]], str]:
        return text_of(self._backbone, request)

    def release_memory(self) -> None:
        release_memory(self._backbone)

    @memory_errors()
    def attach(self, adapter: SlotAdapter) -> int:
        return self._backbone.attach(adapter.on(self._backbone))

    def detach(self, slot: int) -> None:
        self._backbone.detach(slot)

    def bytes_of(self, adapter: SlotAdapter) -> int:
        """The weights, the kernels' copy of them, and what else kernels need."""
        copied = adapter.num_bytes // 4 * self._backbone.path.copy_bytes
        return adapter.num_bytes + copied + self._backbone.kernel_bytes(adapter.spec, adapter.paths)

    def free_bytes(self) -> float | None:
        device = self._backbone.device
        if not is_gpu(device):
            return None
        free, total = free_and_total_bytes(device)
        return free + reserved_bytes(device) - allocated_bytes(device) - MARGIN * total

    def empty_cache(self) -> None:
        empty_cache(self._backbone.device)
