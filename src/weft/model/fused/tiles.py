"""Whether a frozen product may run over all rows at once and still give the bits it gives over a tile of them.

At one row count a row's result does not depend on its neighbours, but a GPU's library may choose another way of summing
for another count. So each shape of product is tried once per row count, on random numbers: where the bits agree, all
rows go in one product; where they do not, in tiles. Either way a row's result is that of its tile.
"""

from __future__ import annotations

import torch

from weft.adapters.frozen import FrozenWeight
from weft.kernels.device import is_gpu
from weft.model.fused.model import FusedModel


def tile_for(model: FusedModel, num_rows: int, row_tile: int | None) -> int | None:
    """`row_tile` if any product of the model needs tiles at this row count, else None: all rows at once."""
    if row_tile is None or num_rows == row_tile:
        return None
    if not is_gpu(model.device):
        return row_tile
    layer = model.layers[0]
    weights = {p.weight.shape: p.weight for p in (layer.qkv, layer.out, layer.gate_up, layer.down)}
    agree = all(_bits_agree(weight, num_rows, row_tile) for weight in weights.values())
    return None if agree else row_tile


@torch.no_grad()
def _bits_agree(weight: FrozenWeight, num_rows: int, row_tile: int) -> bool:
    device = next(iter(weight.stored.values())).device
    generator = torch.Generator(device).manual_seed(0)
    for size, run in ((weight.shape[1], weight.product), (weight.shape[0], weight.input_gradient)):
        x = torch.randn(num_rows, size, dtype=weight.dtype, device=device, generator=generator)
        y = run(x, row_tile)
        if not torch.equal(run(x), y):
            return False
        if weight.adds_up and not torch.equal(run(x, None, y.clone()), run(x, row_tile, y)):
            return False
    return True
