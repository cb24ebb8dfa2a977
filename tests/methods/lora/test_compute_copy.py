"""The copy of an adapter that kernels read follows its masters, even if memory ended the last time it tried."""

from __future__ import annotations

import pytest
import torch
from adapter_on import adapter_on
from whole_linear import WholeLinear

from weft.methods.lora.weights import ComputeCopy
from weft.spec import AdapterSpec


@pytest.mark.parametrize("rank", [8, 12])
def test_copy_when_memory_ends_in_the_middle_then_the_next_call_copies_again(rank, monkeypatch):
    """A rank that is no multiple of 8 is copied module by module, with memory for each."""
    spec = AdapterSpec(r=rank, init_lora_weights=False)
    adapter = adapter_on({"m.q": WholeLinear(32, 64), "m.v": WholeLinear(32, 64)}, spec)
    copy = adapter.method.kernel_copy(adapter, torch.bfloat16)
    assert isinstance(copy, ComputeCopy)
    copy.follow()
    adapter.groups["a"].params.mul_(3)
    adapter.groups["b"].params.mul_(3)
    adapter.changed()

    def end(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short:
        short.setattr(torch.Tensor, "__mul__", end)
        short.setattr(torch, "mul", end)
        with pytest.raises(torch.OutOfMemoryError):
            copy.follow()
    copy.follow()
    for path, weights in adapter.modules.items():
        entry = copy.entries[path]
        assert torch.equal(entry.a_PD[:rank], weights.a_RD.bfloat16())
        assert torch.equal(entry.b_OP[:, :rank], (weights.b_OR * weights.scale).bfloat16())
