"""Parts of an adapter that sit on none of its method's modules: a head for labels, rows of tokens.

Each is one more group of the adapter's parameters, under the name it also has as a module, and is stepped, kept and
moved like the method's own groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class PartShape(ABC):
    """What a part is made of."""

    @property
    @abstractmethod
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors, in the order of its buffer."""

    @abstractmethod
    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Starting values of its tensors."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of each tensor."""
        return [torch.Size(shape).numel() for shape in self.tensor_shapes]

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a flat buffer as the tensors."""
        pieces = zip(flat.split(self.sizes), self.tensor_shapes, strict=True)
        return tuple(piece.view(shape) for piece, shape in pieces)
