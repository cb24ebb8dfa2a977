"""A frozen product with the adapters' part in it: added to the fp32 sums before they are rounded, in one launch.

Forward, for the rows of one owner and each part m of a site (B_m holds scale · B):
    y_m = x W_mᵀ + S_m B_mᵀ             (T, O_m), x (T, D), W (O, D)
Backward:
    dx  = dy W + Σ_m drop_m(dS_m A_m)   (T, D), dy (T, O), parts in order
x and W may be 8-bit floats with a scale for each row and each output (of dy: for each row); the sums are scaled first.
A block of y is summed along D (of dx: along O) from the first to the last in steps of BK; then each run of rows with
one owner gets its ranks' product. Rows are selected, not multiplied by zero: a NaN in another row or slot changes
nothing. Blocks have one size whatever the rows hold, so a row's result depends on nothing but itself.

On Hopper the plain product is nearly as fast as the GPU's library (copy engine, a program for each multiprocessor that
takes tile after tile), and y is neither written nor read a second time. `fits` decides where that holds; elsewhere
`expand` beside a library's product is the better way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from weft.kernels.device import capability, is_gpu, num_multiprocessors
from weft.kernels.launch import cdiv, jit, runs_triton, tl
from weft.kernels.lora.expand import expand_grad_reference, expand_reference
from weft.kernels.lora.runs import add_all_in, add_all_out, in_owner, out_owner
from weft.kernels.lora.tables import ROW_BLOCK, RowTables, Site, SlotTable
from weft.kernels.lora.tile import part_bounds, part_of_block

BLOCKS = {"BN": 256, "num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
"""Beside 128 rows: all that an H200's registers and shared memory hold. With 128 columns a quarter slower; 4 stages
leave no room for the adapters' part. Scale and part are never joined into one operation: it would round once where a
row's block has one owner, and twice where it has several."""
STEP_BYTES = 128
"""Of a row along a sum: what the tensor cores take from shared memory at once."""
SHALLOW = 8192
"""Longest sum for which 16 blocks of rows share the order of columns; above it 8 do. They reuse each other's weights in
the cache, which must hold their rows as well. That is 1 to 2 % of a product."""
NARROW, WIDE = 16, 64
"""Ranks of one product: a narrow adapter does not pay for a wide one's."""


@dataclass(frozen=True)
class Factors:
    """Factors of a product x wᵀ, (T, N), each sum times the scales of its row and column."""

    x_TK: torch.Tensor
    w_NK: torch.Tensor
    """In one piece along K or along N; 8-bit floats along K."""
    scale_T: torch.Tensor | None = None
    scale_N: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """The product alone, in fp32 where the factors are 8-bit floats."""
        if self.scale_T is None:
            return self.x_TK @ self.w_NK.t()
        y_TN = (self.x_TK.float() @ self.w_NK.float().t()) * self.scale_T[:, None]
        return y_TN if self.scale_N is None else y_TN * self.scale_N


def fits(site: Site, like: torch.Tensor, *, backward: bool) -> bool:
    """True if this is the fast way for a site's product: bf16 on Hopper, and no block with outputs of two parts."""
    if not runs_triton(like) or like.dtype != torch.bfloat16 or capability(like.device) != (9, 0):
        return False
    whole_blocks = backward or len(site.sizes) == 1 or all(size % BLOCKS["BN"] == 0 for size in site.sizes)
    return whole_blocks and site.num_in % 16 == 0 and site.num_out % 16 == 0


def product_reference(
    factors: Factors, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor:
    y_TO = factors.plain()
    expand_reference(y_TO, s_TR.to(y_TO.dtype), site, rows, table)
    return y_TO.to(s_TR.dtype)


def product_grad_reference(
    factors: Factors, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor:
    dx_TD = factors.plain()
    expand_grad_reference(dx_TD, ds_TR.to(dx_TD.dtype), site, rows, table)
    return dx_TD.to(ds_TR.dtype)


@jit
def _block_of_tile(tile, row_blocks, column_blocks, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tile // (GROUP * column_blocks)
    size = min(row_blocks - group * GROUP, GROUP)
    inside = tile % (GROUP * column_blocks)
    return group * GROUP + inside % size, inside // size


@jit
def _halves(acc, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and the right columns of a block, each where its threads already hold it."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@jit
def sum_block(x, w, row, column, num_k, ALONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of x wᵀ, fp32; ALONG: w lies along the sums."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, num_k, BK):
        if ALONG:
            acc = tl.dot(x.load([row, k]), w.load([column, k]).T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x.load([row, k]), w.load([k, column]), acc, input_precision="ieee")
    return acc


@jit
def scaled(half, row_scales, scale, columns, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    if ROWS:
        half *= row_scales[:, None]
    if COLUMNS:
        half *= tl.load(scale + columns, mask=columns < num_columns, other=0.0)[None, :]
    return half


@jit
def _product(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    row_scale,
    column_scale,
    s,
    table,
    runs,
    blocks,
    stride_s,
    module,
    num_modules,
    num_rows,
    num_in,
    size_0,
    size_1,
    size_2,
    SCALED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows, BM)
    column_blocks = tl.cdiv(size_0 + size_1 + size_2, BN)
    for tile in range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0)):
        row_block, column_block = _block_of_tile(tile, row_blocks, column_blocks, GROUP)
        row, column = row_block * BM, column_block * BN
        part, block = part_of_block(column_block, size_0, size_1, NUM_PARTS, BN)
        begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
        # Loads for the first run start before the sums and are complete after them.
        first, last = tl.load(blocks + row_block * 2), tl.load(blocks + row_block * 2 + 1)
        owner = out_owner(table, runs, first, module + part, num_modules, s.dtype.element_ty)
        rows = row + tl.arange(0, BM)
        row_scales = rows
        if SCALED:
            row_scales = tl.load(row_scale + rows, mask=rows < num_rows, other=0.0)
        left, right = _halves(sum_block(x, w, row, column, num_in, True, BM, BN, BK), BM, BN)
        columns = block * BN + tl.arange(0, BN // 2)
        left = scaled(left, row_scales, column_scale + begin, columns, size, SCALED, SCALED)
        left = add_all_out(
            left, s, stride_s, owner, table, runs, first, last, module + part, num_modules, row, columns, size,
            NARROW, WIDE,
        )  # fmt: skip
        y.store([row, column], left.to(y.dtype))
        columns += BN // 2
        right = scaled(right, row_scales, column_scale + begin, columns, size, SCALED, SCALED)
        right = add_all_out(
            right, s, stride_s, owner, table, runs, first, last, module + part, num_modules, row, columns, size,
            NARROW, WIDE,
        )  # fmt: skip
        y.store([row, column + BN // 2], right.to(y.dtype))


@jit
def _product_grad(  # type: ignore[no-untyped-def]
    dy,
    w,
    dx,
    row_scale,
    ds,
    table,
    runs,
    blocks,
    keys,
    stride_s,
    module,
    num_modules,
    num_rows,
    num_in,
    num_out,
    SCALED: tl.constexpr,
    ALONG: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DROPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows, BM)
    column_blocks = tl.cdiv(num_in, BN)
    for tile in range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0)):
        row_block, column_block = _block_of_tile(tile, row_blocks, column_blocks, GROUP)
        row, column = row_block * BM, column_block * BN
        first, last = tl.load(blocks + row_block * 2), tl.load(blocks + row_block * 2 + 1)
        owner = in_owner(table, runs, first, module, num_modules, ds.dtype.element_ty, NUM_PARTS)
        rows = row + tl.arange(0, BM)
        row_keys = rows
        if DROPS:
            row_keys = tl.load(keys + rows, mask=rows < num_rows, other=0)
        row_scales = rows
        if SCALED:
            row_scales = tl.load(row_scale + rows, mask=rows < num_rows, other=0.0)
        left, right = _halves(sum_block(dy, w, row, column, num_out, ALONG, BM, BN, BK), BM, BN)
        left = scaled(left, row_scales, row_scale, row_scales, 0, SCALED, False)
        right = scaled(right, row_scales, row_scale, row_scales, 0, SCALED, False)
        features = column + tl.arange(0, BN // 2)
        left = add_all_in(
            left, ds, stride_s, owner, row_keys, table, runs, first, last, module, num_modules, row, features, num_in,
            NUM_PARTS, DROPS, NARROW, WIDE,
        )  # fmt: skip
        dx.store([row, column], left.to(dx.dtype))
        features += BN // 2
        right = add_all_in(
            right, ds, stride_s, owner, row_keys, table, runs, first, last, module, num_modules, row, features, num_in,
            NUM_PARTS, DROPS, NARROW, WIDE,
        )  # fmt: skip
        dx.store([row, column + BN // 2], right.to(dx.dtype))


def product_kernel(factors: Factors, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> torch.Tensor:
    """X Wᵀ + S Bᵀ, (T, O), in the type of S."""
    x_TD, w_OD = factors.x_TK, factors.w_NK
    y_TO = s_TR.new_empty(len(x_TD), site.num_out)
    launch = {"BM": ROW_BLOCK, "BK": STEP_BYTES // x_TD.element_size(), **BLOCKS}
    _product[(_num_programs(len(x_TD), site.num_out, launch, x_TD.device),)](
        blocks_of(x_TD, launch["BM"], launch["BK"]),
        blocks_of(w_OD, launch["BN"], launch["BK"]),
        blocks_of(y_TO, launch["BM"], launch["BN"] // 2),
        s_TR if factors.scale_T is None else factors.scale_T,
        s_TR if factors.scale_N is None else factors.scale_N,
        s_TR,
        table.device_SMF,
        rows.runs_G4,
        rows.blocks_B2,
        s_TR.stride(0),
        site.module,
        table.num_modules,
        len(x_TD),
        site.num_in,
        *site.three_sizes,
        SCALED=factors.scale_T is not None,
        NUM_PARTS=len(site.sizes),
        GROUP=_group(site.num_in),
        NARROW=NARROW,
        WIDE=WIDE,
        **launch,
    )
    return y_TO


def product_grad_kernel(
    factors: Factors, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor:
    """dY W + Σ drop(dS A), (T, D), in the type of dS."""
    dy_TO, w_DO = factors.x_TK, factors.w_NK
    dx_TD = ds_TR.new_empty(len(dy_TO), site.num_in)
    width, step = BLOCKS["BN"], STEP_BYTES // dy_TO.element_size()
    is_along = w_DO.stride(1) == 1
    launch = {"BM": ROW_BLOCK, "BK": step, **BLOCKS}
    _product_grad[(_num_programs(len(dy_TO), site.num_in, launch, dy_TO.device),)](
        blocks_of(dy_TO, ROW_BLOCK, step),
        blocks_of(w_DO, width, step) if is_along else blocks_of(w_DO.t(), step, width),
        blocks_of(dx_TD, ROW_BLOCK, width // 2),
        ds_TR if factors.scale_T is None else factors.scale_T,
        ds_TR,
        table.device_SMF,
        rows.runs_G4,
        rows.blocks_B2,
        rows.keys_T,
        ds_TR.stride(0),
        site.module,
        table.num_modules,
        len(dy_TO),
        site.num_in,
        site.num_out,
        SCALED=factors.scale_T is not None,
        ALONG=is_along,
        NUM_PARTS=len(site.sizes),
        DROPS=table.drops and rows.drops,
        GROUP=_group(site.num_out),
        NARROW=NARROW,
        WIDE=WIDE,
        **launch,
    )
    return dx_TD


def blocks_of(matrix: torch.Tensor, num_rows: int, num_columns: int) -> object:
    """The matrix as the copy engine reads and writes it: in blocks, clipped at its edges."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [num_rows, num_columns])


def _group(num_summed: int) -> int:
    return 16 if num_summed <= SHALLOW else 8


def _num_programs(num_rows: int, num_columns: int, launch: Mapping[str, int], device: torch.device) -> int:
    return min(multiprocessors(device), cdiv(num_rows, launch["BM"]) * cdiv(num_columns, launch["BN"]))


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    return num_multiprocessors(device) if is_gpu(device) else 2
