"""Adapters for inference: in host memory in the layout of slots, and on as many slots as memory allows.

An adapter is read and checked beside decoding, by any thread. The thread that decodes only copies it to the device when
a sequence needs it. If there is no room, the least recently used one gives up its slot; nothing is copied back, since
its weights are still in host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import ModuleTensors
from weft.engine.inference.attach import StoredAdapter, adapter_on
from weft.kernels.device import CPU
from weft.model.backbone import Backbone
from weft.spec import AdapterSpec
from weft.store.peft_files import PARTS

LEAST_SLOTS, MOST_SLOTS = 8, 512
"""Minimum number of slots for chats, whatever room there is, and maximum number."""


class SlotAdapter(Protocol):
    """An adapter that can be put on a slot; those of one name have the same weights."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> AdapterSpec: ...

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights in fp32."""

    @property
    def chat_template(self) -> str | None:
        """Chat template it was trained with instead of the base model's."""

    def on(self, backbone: Backbone) -> Adapter:
        """The adapter on the backbone's device, without a slot."""


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter that fits the backbone, in host memory."""

    name: str
    spec: AdapterSpec
    paths: tuple[str, ...]
    flat: Mapping[str, torch.Tensor]
    chat_template: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(params.numel() * params.element_size() for params in self.flat.values())

    def on(self, backbone: Backbone) -> Adapter:
        made = backbone.stored_adapter(self.spec, self.paths)
        made.put(self.flat)
        return made


@dataclass(frozen=True, eq=False)
class LiveAdapter:
    """An adapter as in files, such as one that trains, of which slots get a copy as it is now."""

    name: str
    spec: AdapterSpec
    tensors: Mapping[str, ModuleTensors]
    chat_template: str | None = None

    @property
    def paths(self) -> list[str]:
        return [path for path in self.tensors if path not in PARTS]

    @property
    def num_bytes(self) -> int:
        return sum(4 * tensor.numel() for tensors in self.tensors.values() for tensor in tensors)

    def on(self, backbone: Backbone) -> Adapter:
        made = backbone.stored_adapter(self.spec, self.paths)
        made.load(self.tensors, self.name)
        return made


def host_adapter(backbone: Backbone, stored: StoredAdapter) -> HostAdapter:
    """AdapterFileError if an adapter does not fit the backbone, or has a head for labels. Any thread may call this."""
    adapter = adapter_on(backbone, stored, device=CPU)
    paths = tuple(path for path in stored.tensors if path not in PARTS)
    return HostAdapter(stored.name, adapter.spec, paths, adapter.flat(), stored.chat_template)


class _HeldSlot(NamedTuple):
    slot: int
    num_bytes: int


class SlotReplica(Protocol):
    """Replica that has the slots."""

    memory_bytes: int
    """All memory for weights, activations and adapters."""

    def attach(self, adapter: SlotAdapter) -> int:
        """Puts an adapter on a free slot; torch.OutOfMemoryError if there is no memory for it."""

    def detach(self, slot: int) -> None: ...

    def bytes_of(self, adapter: SlotAdapter) -> int:
        """Bytes of an adapter on a slot."""

    def free_bytes(self) -> float | None:
        """Bytes that adapters may still take; None where memory is not limited."""

    def empty_cache(self) -> None:
        """Returns memory that is reserved and not used."""


class AdapterSlots:
    def __init__(self, replica: SlotReplica, share: float) -> None:
        """`share`: part of the memory that adapters may take."""
        self._replica = replica
        self.most_bytes = int(replica.memory_bytes * share)
        self._held: OrderedDict[str, _HeldSlot] = OrderedDict()
        """Adapters on slots by name, the least recently used first."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def slot(self, adapter: SlotAdapter, in_use: Callable[[], Collection[str]]) -> int | None:
        """The slot of an adapter, which is put there if it has none; None as long as those in use leave no room. Raises
        torch.OutOfMemoryError if there is no memory for it beside none in use."""
        if adapter.name not in self._held:
            num_bytes = self._replica.bytes_of(adapter)
            used: Collection[str] | None = None
            while not self._has_room(num_bytes):
                used = in_use() if used is None else used
                if not self._free_one(used):
                    return None
            try:
                self._held[adapter.name] = _HeldSlot(self._replica.attach(adapter), num_bytes)
            except torch.OutOfMemoryError:
                used = in_use()
                while self._free_one(used):
                    pass
                self._replica.empty_cache()
                if used:
                    return None
                self._held[adapter.name] = _HeldSlot(self._replica.attach(adapter), num_bytes)
        self._held.move_to_end(adapter.name)
        return self._held[adapter.name].slot

    def free(self, names: Collection[str]) -> None:
        """Frees the slots of adapters that are not in use."""
        for name in names:
            self._replica.detach(self._held.pop(name).slot)

    def _has_room(self, num_bytes: int) -> bool:
        if len(self._held) < LEAST_SLOTS:
            return True
        held = sum(each.num_bytes for each in self._held.values())
        if len(self._held) >= MOST_SLOTS or held + num_bytes > self.most_bytes:
            return False
        free = self._replica.free_bytes()
        return free is None or num_bytes <= free

    def _free_one(self, in_use: Collection[str]) -> bool:
        """Frees the slot that has been unused for longest; False if all are in use."""
        unused = next((name for name in self._held if name not in in_use), None)
        if unused is not None:
            self.free([unused])
        return unused is not None
