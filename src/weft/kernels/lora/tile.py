"""The adapter's part of a tile: device functions that the kernels of linears share.

A tile is up to BM rows of one owner. For the part m of a site with inputs x (D) and outputs y (O_m):
    out_delta: S_m B_mᵀ                     added to a block of the part's outputs
    in_delta:  dS_m A_m                     dropped, then added to a block of the site's inputs
A row is only ever multiplied with its own owner's A and B, so nothing of a neighbour can reach it.

Names: table, slot, num_modules: the line of a module; e_*: fields of that line; s: S or dS, (T, stride_s).
"""

from __future__ import annotations

from weft.kernels.launch import jit, tl


@jit
def line_of(table, slot, module, num_modules):  # type: ignore[no-untyped-def]
    return table + (slot.to(tl.int64) * num_modules + module) * 23


@jit
def pad(rank):  # type: ignore[no-untyped-def]
    """Columns a rank takes: the next multiple of 8, and known to be one, so that masks by it allow whole vectors."""
    return (rank + 7) // 8 * 8


@jit
def float_field(line, field):  # type: ignore[no-untyped-def]
    return tl.load(line + field).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def drop_threshold(line):  # type: ignore[no-untyped-def]
    """Lower half of the dropout field: what the first 31 bits of an input must reach to be kept."""
    return (tl.load(line + 7) & 0x7FFFFFFF).to(tl.int32)


@jit
def drop_seed(line):  # type: ignore[no-untyped-def]
    return (tl.load(line + 7) >> 32).to(tl.int32).to(tl.uint32, bitcast=True)


@jit
def feature_keys(features, seed):  # type: ignore[no-untyped-def]
    """Dropout's keys of a module's features. Computed, not loaded: the result has the layout in which it is used."""
    return features.to(tl.uint32) * 0x9E3779B1 + seed


@jit
def keep_scale(threshold):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 - threshold.to(tl.float32) / 2147483648.0)


@jit
def is_kept(keys, f, threshold):  # type: ignore[no-untyped-def]
    """The mask of weft.kernels.dropout from the keys of rows and features: true where an input is kept."""
    factors = f * 0xFFD66A5A + 1
    bits = (keys.to(tl.uint32, bitcast=True)[:, None] ^ f[None, :]) * factors[None, :]
    return bits >= threshold.to(tl.uint32) * 2


@jit
def part_width(line):  # type: ignore[no-untyped-def]
    return pad(tl.load(line).to(tl.int32))


@jit
def is_mine(table, slot, module, num_modules, ABOVE: tl.constexpr, UPTO: tl.constexpr):  # type: ignore[no-untyped-def]
    """True if a `RankLaunch` takes a slot's rows."""
    widest = tl.load(line_of(table, slot, module, num_modules)) >> 32
    return (widest > ABOVE) & (widest <= UPTO)


@jit
def part_column(line):  # type: ignore[no-untyped-def]
    """First column of a part in S, a multiple of 8."""
    return tl.load(line + 1).to(tl.int32) // 8 * 8


@jit
def part_bounds(part, size_0, size_1, size_2, NUM_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start of a part's outputs among a site's, and their number."""
    begin = 0
    size = size_0
    if NUM_PARTS > 1 and part == 1:
        begin = size_0
        size = size_1
    if NUM_PARTS > 2 and part == 2:
        begin = size_0 + size_1
        size = size_2
    return begin, size


@jit
def part_of_block(block, size_0, size_1, NUM_PARTS: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part a block of outputs belongs to, and its number there: blocks are counted part by part."""
    part = 0
    if NUM_PARTS > 1 and block >= tl.cdiv(size_0, BN):
        block -= tl.cdiv(size_0, BN)
        part = 1
        if NUM_PARTS > 2 and block >= tl.cdiv(size_1, BN):
            block -= tl.cdiv(size_1, BN)
            part = 2
    return part, block


@jit
def weight_a(line, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(line + 2).to(tl.pointer_type(dtype)), 16)


@jit
def weight_b(line, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(line + 3).to(tl.pointer_type(dtype)), 16)


@jit
def rank_tile(s, stride_s, column, width, r, rows, row_mask, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns [r, r + BR) of a part's S, zero beyond its width."""
    ranks = r + tl.arange(0, BR)
    return tl.load(
        s + rows.to(tl.int64)[:, None] * stride_s + (column + ranks)[None, :],
        mask=row_mask[:, None] & (ranks < width)[None, :],
        other=0.0,
    )


@jit
def out_block(s_tile, b, width, r, columns, inside, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """S Bᵀ over the ranks [r, r + BR), for a block of a part's outputs; fp32."""
    ranks = r + tl.arange(0, BR)
    b_tile = tl.load(
        b + columns.to(tl.int64)[:, None] * width + ranks[None, :],
        mask=inside[:, None] & (ranks < width)[None, :],
        other=0.0,
    )
    return tl.dot(s_tile, tl.trans(b_tile), input_precision="ieee")


@jit
def in_block(s_tile, a, width, r, features, num_features, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """dS A over the ranks [r, r + BR), for a block of a site's inputs; fp32."""
    ranks = r + tl.arange(0, BR)
    a_tile = tl.load(
        a + ranks.to(tl.int64)[:, None] * num_features + features[None, :],
        mask=(ranks < width)[:, None] & (features < num_features)[None, :],
        other=0.0,
    )
    return tl.dot(s_tile, a_tile, input_precision="ieee")


@jit
def out_delta(  # type: ignore[no-untyped-def]
    s_tile,
    s,
    stride_s,
    column,
    width,
    b,
    rows,
    row_mask,
    columns,
    inside,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    """S_m B_mᵀ for a tile's rows and `columns` of the part; `s_tile` holds the first ranks, read once."""
    acc = out_block(s_tile, b, width, 0, columns, inside, BR)
    # Without a loop where one block holds every rank: half the registers, and an outer loop can load ahead.
    if RANK_BLOCKS > 1:
        for r in range(BR, width, BR):
            more = rank_tile(s, stride_s, column, width, r, rows, row_mask, BR)
            acc += out_block(more, b, width, r, columns, inside, BR)
    return acc


@jit
def in_delta(  # type: ignore[no-untyped-def]
    s_tile,
    ds,
    stride_s,
    column,
    width,
    a,
    rows,
    row_mask,
    features,
    num_features,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    """dS_m A_m for a tile's rows and `features`, before dropout; `s_tile` holds the first ranks."""
    acc = in_block(s_tile, a, width, 0, features, num_features, BR)
    if RANK_BLOCKS > 1:
        for r in range(BR, width, BR):
            more = rank_tile(ds, stride_s, column, width, r, rows, row_mask, BR)
            acc += in_block(more, a, width, r, features, num_features, BR)
    return acc


@jit
def drop(delta, line, threshold, row_keys, features):  # type: ignore[no-untyped-def]
    """drop_m of a part's input gradient; with a threshold of zero the delta itself."""
    kept = is_kept(row_keys, feature_keys(features, drop_seed(line)), threshold)
    return tl.where(kept, delta * keep_scale(threshold), 0.0)


@jit
def dropped(delta, line, keys, rows, row_mask, features):  # type: ignore[no-untyped-def]
    """The same, without any work where nothing is dropped."""
    threshold = drop_threshold(line)
    if threshold > 0:
        row_keys = tl.load(keys + rows, mask=row_mask, other=0)
        delta = drop(delta, line, threshold, row_keys, features)
    return delta
