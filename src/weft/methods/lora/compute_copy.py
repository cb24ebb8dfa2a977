"""An adapter's weights as kernels read them: in the type of the activations, ranks padded, B times the scale.

The fp32 masters stay in the adapter; this copy follows them. Where devices share a module's inputs, its part of the
gradient of A lies in columns, which kernels do not write: they have a buffer of their own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.adapters.method import KernelCopy
from weft.kernels.fixed_words import Words, collect
from weft.kernels.lora.tables import Entry, padded
from weft.methods.lora.weights import LoraWeights

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class ComputeCopy(KernelCopy):
    """A and scale · B of one adapter, module after module in two flat buffers."""

    def __init__(
        self,
        adapter: Adapter,
        dtype: torch.dtype,
        modules: Mapping[str, LoraWeights],
        groups: tuple[str, str] = ("a", "b"),
    ) -> None:
        """`modules`: what is a LoRA of it, by path; `groups`: those of its A and B."""
        super().__init__(adapter)
        self._modules, self._groups = modules, groups
        self._words = {
            group: Words.of_nothing(adapter.groups[group].grad)
            for group in groups
            if adapter.has_any_order_sums and group in adapter.groups
        }
        """Where kernels add gradients, if no order of samples is to matter; as the gradients lie."""
        self._parts = [
            (w.grad_a_RD, torch.zeros_like(w.grad_a_RD, memory_format=torch.contiguous_format))
            for w in modules.values()
            if not w.grad_a_RD.is_contiguous()
        ]
        """Gradients of A that are columns of larger ones, and where kernels leave them."""
        left = {id(grad): own for grad, own in self._parts}
        starts = dict.fromkeys(groups, 0)
        sizes_a = [padded(w.a_RD.shape[0]) * w.a_RD.shape[1] for w in self._modules.values()]
        sizes_b = [padded(w.a_RD.shape[0]) * w.b_OR.shape[0] for w in self._modules.values()]
        self._a = torch.zeros(sum(sizes_a), dtype=dtype, device=adapter.device)
        self._b = torch.zeros(sum(sizes_b), dtype=dtype, device=adapter.device)
        for (path, w), a, b in zip(self._modules.items(), self._a.split(sizes_a), self._b.split(sizes_b), strict=True):
            rank = w.a_RD.shape[0]
            words = {}
            for group, grad in zip(groups, (w.grad_a_RD, w.grad_b_OR), strict=True):
                if group in self._words:
                    words[group] = self._words[group].part(starts[group], grad.shape)
                    starts[group] += grad.numel()
            self.entries[path] = Entry(
                rank,
                a.view(padded(rank), -1),
                b.view(-1, padded(rank)),
                left.get(id(w.grad_a_RD), w.grad_a_RD),
                w.grad_b_OR,
                w.scale,
                w.dropout,
                w.key,
                words.get(groups[0]),
                words.get(groups[1]),
                w.first_input,
            )
        scales = {entry.scale for entry in self.entries.values()}
        aligned = all(entry.rank % 8 == 0 for entry in self.entries.values())
        is_whole = [adapter.flat()[group].numel() for group in groups] == [self._a.numel(), self._b.numel()]
        self._scale = scales.pop() if aligned and is_whole and len(scales) == 1 else None
        """The one scale of all modules, if the copy is laid out as the masters are: it then follows in two calls."""

    def collect(self) -> None:
        """Adds order-independent sums to the gradients, each rounded once, and what kernels left elsewhere."""
        for grad_RD, left_RD in self._parts:
            grad_RD.add_(left_RD)
            left_RD.zero_()
        for group, words in self._words.items():
            collect(words, self._adapter.groups[group].grad)

    def clear_gradients(self) -> None:
        """Those of order-independent sums, and those left elsewhere."""
        for _, left_RD in self._parts:
            left_RD.zero_()
        for words in self._words.values():
            words.forget()

    def any_order_words(self) -> Mapping[str, Words]:
        """The sums so far."""
        return self._words

    def copy_weights(self) -> None:
        """Copies the masters."""
        if self._scale is not None:
            a, b = (self._adapter.flat()[group] for group in self._groups)
            self._a.copy_(a)
            torch.mul(b, self._scale, out=self._b)
        else:
            for path, w in self._modules.items():
                entry = self.entries[path]
                entry.a_PD[: entry.rank].copy_(w.a_RD)
                entry.b_OP[:, : entry.rank].copy_(w.b_OR * w.scale)
