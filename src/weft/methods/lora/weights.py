"""LoRA on the rows of one slot, in plain torch, and its weights as kernels read them.

Forward, for the rows x of one slot with adapter (A, B, scale, p):
    S = drop(x) Aᵀ                        (L, R)
    y += scale · S Bᵀ                     (L, O)
Backward, with dy the gradient of y:
    dS = scale · dy B                     (L, R)
    dB += scale · dyᵀ S                   (O, R), fp32, sample by sample in the job's order
    dA += dSᵀ drop(x)                     (R, D), fp32, likewise
    dx += drop(dS A)                      (L, D)
Only x, S and the dropout mask are kept. Products over rows run in windows of a fixed size (adapters/routing.py), which
may reach over the neighbours' rows, whose results are left unused, never masked by a product. Products over tokens (dA,
dB) touch one sample's rows alone. So a NaN in another segment or another slot changes nothing here.

Kernels read a copy of the fp32 masters that follows them: in the type of the activations, ranks padded, B times the
scale. Where devices share a module's inputs, its part of the gradient of A lies in columns, which kernels do not write:
they have a buffer of their own there.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import KernelCopy, SlotWeights
from weft.adapters.routing import Routing, SlotRows, Window, add_product, joined
from weft.kernels.dropout import drop, keep_mask
from weft.kernels.fixed_point import Words, collect
from weft.kernels.lora.tables import Entry, padded

KeptRows = list[tuple[torch.Tensor, torch.Tensor | None]]
"""S and the dropout mask of every window."""


@dataclass
class LoraWeights(SlotWeights):
    a_RD: torch.Tensor
    b_OR: torch.Tensor
    grad_a_RD: torch.Tensor
    """Empty where A is frozen."""
    grad_b_OR: torch.Tensor
    scale: float
    dropout: float
    key: int
    """Stable number of the module, part of every dropout key."""
    first_input: int
    """Index of x's first feature among all of the module's, if other devices hold other features."""

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> KeptRows:
        a_RD, b_OR = self.compute_weights(x_TD.dtype)
        a_DR, b_RO = a_RD.t(), b_OR.t()
        kept: KeptRows = []
        for window in rows.windows:
            keep_LD = self.keep(window, routing, x_TD.shape[1])
            s_LR = self.dropped(x_TD[window.computed], keep_LD).mm(a_DR)
            y_TO[window.own].add_(s_LR.mm(b_RO)[window.inside], alpha=self.scale)
            kept.append((s_LR[window.inside], keep_LD))
        return kept

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: KeptRows
    ) -> None:
        a_RD, b_OR = self.compute_weights(dy_TO.dtype)
        inputs, gradients = [], []
        for window, (_, keep_LD) in zip(rows.windows, kept, strict=True):
            ds_LR = dy_TO[window.computed].mm(b_OR).mul_(self.scale)
            if self.grad_a_RD.numel():
                inputs.append(self.dropped(x_TD[window.computed], keep_LD)[window.inside])
            gradients.append(ds_LR[window.inside])
            if dx_TD is not None:
                dx_TD[window.own].add_(self.dropped(ds_LR.mm(a_RD), keep_LD)[window.inside])
        shrunk = [s_LR for s_LR, _ in kept]
        x_LD = joined(inputs) if inputs else x_TD[rows.own]
        self.accumulate(rows, x_LD, joined(shrunk), joined(gradients), dy_TO)

    def accumulate(
        self, rows: SlotRows, x_LD: torch.Tensor, s_LR: torch.Tensor, ds_LR: torch.Tensor, dy_TO: torch.Tensor
    ) -> None:
        """Adds dA and dB sample by sample, an order that no cut into microbatches changes."""
        for sample in rows.samples:
            dy_LO, own = dy_TO[sample.buffer], sample.slot
            add_product(self.grad_b_OR, dy_LO, s_LR[own], self.scale)
            if self.grad_a_RD.numel():
                add_product(self.grad_a_RD, ds_LR[own], x_LD[own], 1.0)

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype is torch.float32:
            return self.a_RD, self.b_OR
        return self.a_RD.to(dtype), self.b_OR.to(dtype)

    def keep(self, window: Window, routing: Routing, num_features: int) -> torch.Tensor | None:
        """The dropout mask of a window on this module; None without dropout."""
        if self.dropout == 0 or routing.dropout_keys_T is None:
            return None
        return keep_mask(
            routing.dropout_keys_T[window.computed], self.key, num_features, self.dropout, first=self.first_input
        )

    def dropped(self, x_LD: torch.Tensor, keep_LD: torch.Tensor | None) -> torch.Tensor:
        return x_LD if keep_LD is None else drop(x_LD, keep_LD, self.dropout)


class ComputeCopy(KernelCopy):
    """A and scale · B of one adapter, module by module in two flat buffers."""

    def __init__(
        self,
        adapter: Adapter,
        dtype: torch.dtype,
        modules: Mapping[str, LoraWeights],
        groups: tuple[str, str] = ("a", "b"),
    ) -> None:
        super().__init__(adapter)
        self._modules, self._groups = modules, groups
        grads = {groups[0]: [w.grad_a_RD for w in modules.values()], groups[1]: [w.grad_b_OR for w in modules.values()]}
        self._words = {
            group: Words.of_nothing(adapter.groups[group].grad.new_empty(sum(grad.numel() for grad in grads[group])))
            for group in groups
            if adapter.has_any_order_sums and group in adapter.groups
        }
        """Order-independent sums of the kernels, module by module."""
        self._parts = [
            (w.grad_a_RD, torch.zeros_like(w.grad_a_RD, memory_format=torch.contiguous_format))
            for w in modules.values()
            if not w.grad_a_RD.is_contiguous()
        ]
        """Gradients of A that are not contiguous, with contiguous buffers for the kernels."""
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
        """The scale of all modules if it is one and the copy has the masters' layout: two calls update it."""

    def collect(self) -> None:
        """Adds order-independent sums to the gradients, each rounded once, and what kernels left elsewhere."""
        for grad_RD, left_RD in self._parts:
            grad_RD.add_(left_RD)
            left_RD.zero_()
        for group, words in self._words.items():
            collect(words, self._adapter.groups[group].grad)

    def clear_gradients(self) -> None:
        for _, left_RD in self._parts:
            left_RD.zero_()
        for words in self._words.values():
            words.forget()

    def any_order_words(self) -> Mapping[str, Words]:
        return {group: self._in_whole(group, words) for group, words in self._words.items()}

    def _in_whole(self, group: str, words: Words) -> Words:
        """Sums in the layout of the gradients, of which this device may have a part."""
        grad_P = self._adapter.groups[group].grad
        if words.fine_P.numel() == grad_P.numel():
            return words
        whole, start = Words.of_nothing(grad_P), 0
        fine, coarse = (self._adapter.own_views(group, each_P) for each_P in (whole.fine_P, whole.coarse_P))
        for path in self._modules:
            own = words.part(start, fine[path].shape)
            fine[path].copy_(own.fine_P)
            coarse[path].copy_(own.coarse_P)
            start += fine[path].numel()
        return whole

    def copy_weights(self) -> None:
        if self._scale is not None:
            a, b = (self._adapter.flat()[group] for group in self._groups)
            self._a.copy_(a)
            torch.mul(b, self._scale, out=self._b)
        else:
            for path, w in self._modules.items():
                entry = self.entries[path]
                entry.a_PD[: entry.rank].copy_(w.a_RD)
                entry.b_OP[:, : entry.rank].copy_(w.b_OR * w.scale)
