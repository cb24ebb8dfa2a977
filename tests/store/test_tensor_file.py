"""Files written from the tensors' own memory are those that safetensors itself would write."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import save

from weft.store.checkpoint import file_pieces, sha256

MIXED = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor(3.0),
    "z": torch.ones(5, dtype=torch.bfloat16),
    "y": torch.arange(4),
    "w": torch.ones(3, dtype=torch.float64),
    "v": torch.zeros(2, dtype=torch.float16),
    "u": torch.ones(2, dtype=torch.uint8),
    "signed": torch.full((3,), -2, dtype=torch.int8),
    "t": torch.tensor([True, False]),
    "s": torch.arange(3, dtype=torch.int32),
    "empty": torch.zeros(0, 4),
    'quote " and ä': torch.zeros(1),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_file_when_tensors_have_any_type_then_has_the_bytes_of_safetensors(metadata):
    """A reader of the file cannot see which of them wrote it."""
    pieces = file_pieces(MIXED, metadata)
    expected = save(MIXED, metadata=metadata)
    assert b"".join(pieces) == expected
    assert sha256(pieces) == hashlib.sha256(expected).hexdigest()


def test_file_when_a_tensor_is_a_view_then_holds_its_numbers_in_order():
    """Adapters are views of flat buffers, and some are turned."""
    turned = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    assert b"".join(file_pieces({"x": turned})) == save({"x": turned.contiguous()})
    flat = torch.arange(10, dtype=torch.float32)
    parts = {"head": flat[:4], "tail": flat[4:]}
    assert b"".join(file_pieces(parts)) == save({name: part.clone() for name, part in parts.items()})
