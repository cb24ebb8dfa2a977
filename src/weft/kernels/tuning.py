"""Sizes of blocks and numbers of warps, by operation, class of ranks and kind of GPU.

Keys never contain anything of a batch. No choice here changes a bit of a result: the order of sums is set by
`REDUCTION` and `rank_blocks`, the same everywhere. A GPU without a table gets the H200's, with as many
stages as its shared memory holds, until `weft tune` has measured it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from weft.kernels.device import capability, device_name, is_gpu
from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.lora.tables import ROW_TILE

REDUCTION = 128
"""Elements of one block along a summed dimension: part of every result, so never tuned. On an H200 128 moved 3.5 TB/s
in `shrink` where 64 moved 1.2 to 2.6."""
SHARED_BYTES = {
    (8, 0): 163 * 1024,  # A100
    (8, 6): 99 * 1024,  # A40, RTX 3090
    (8, 9): 99 * 1024,  # L40S, RTX 4090
    (9, 0): 227 * 1024,  # H100, H200
    (10, 0): 227 * 1024,  # B200
    (12, 0): 99 * 1024,  # RTX 5090
}
"""Shared memory of one program by compute capability; unknown GPUs get the least."""

Choice = Mapping[str, int]
Table = Mapping[str, Choice]
"""Choices by "operation/class", such as "shrink/16"; classes as of `RankLaunch`: up to 16, 64, more."""

H200: Table = {
    # us at 8192 x 4096: 21 for one part of rank 16, 31 with dropout, which wants more and smaller programs
    "shrink/16": {"BM": 32, "num_warps": 4, "num_stages": 5},
    "shrink/64": {"BM": 64, "num_warps": 8, "num_stages": 5},
    "shrink/more": {"BM": 64, "num_warps": 8, "num_stages": 5},
    # 20 for rank 16, 22 for rank 64 (31 with 32 rows)
    "shrink_grad/16": {"BM": 64, "num_warps": 8, "num_stages": 5},
    "shrink_grad/64": {"BM": 64, "num_warps": 8, "num_stages": 5},
    "shrink_grad/more": {"BM": 64, "num_warps": 8, "num_stages": 5},
    # 22 for A or B of rank 16, 27 for the A of three parts
    "weight_grad/16": {"BN": 64, "num_warps": 4, "num_stages": 3},
    "weight_grad/64": {"BN": 64, "num_warps": 4, "num_stages": 3},
    "weight_grad/more": {"BN": 64, "num_warps": 4, "num_stages": 3},
    # 38 for rank 16
    "expand/16": {"BN": 64, "num_warps": 4, "num_stages": 2},
    "expand/64": {"BN": 128, "num_warps": 4, "num_stages": 1},
    "expand/more": {"BN": 128, "num_warps": 4, "num_stages": 1},
    # 26 for one part of rank 16 that adds to nothing, 36 with dropout (55 with 128 columns: registers)
    "expand_grad/16": {"BN": 64, "num_warps": 4, "num_stages": 2},
    "expand_grad/64": {"BN": 64, "num_warps": 4, "num_stages": 2},
    "expand_grad/more": {"BN": 128, "num_warps": 4, "num_stages": 2},
}
SHIPPED = {"H200": H200, "H100": H200}
"""Measured tables by part of a GPU's name; the H100 has the H200's multiprocessors."""

_WARPS, _STAGES = (4, 8), (2, 3, 4, 5)
_WIDTHS = (64, 128, 256)
"""Never 32: with it Triton 3.6 computed products of wide ranks wrongly."""
_OPTIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "shrink": {"BM": (16, 32, 64), "num_warps": _WARPS, "num_stages": _STAGES},
    "shrink_grad": {"BM": (16, 32, 64), "num_warps": _WARPS, "num_stages": _STAGES},
    "weight_grad": {"BN": _WIDTHS[:2], "num_warps": _WARPS, "num_stages": _STAGES},
    "expand": {"BN": _WIDTHS, "num_warps": _WARPS, "num_stages": (1, 2, 3)},
    "expand_grad": {"BN": _WIDTHS, "num_warps": _WARPS, "num_stages": (1, 2)},
}

TRYING: dict[str, Choice] = {}
"""Choices on trial, by key."""


def class_of(rank_class: int) -> str:
    return str(rank_class) if rank_class <= 16 else "64" if rank_class <= 64 else "more"


def candidates(key: str) -> list[Choice]:
    options = _OPTIONS[key.partition("/")[0]]
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


@contextmanager
def trying(key: str, choice: Choice) -> Iterator[None]:
    """Context manager: within it, kernel launches with this key use `choice`."""
    TRYING[key] = choice
    try:
        yield
    finally:
        del TRYING[key]


def tuning_file() -> Path:
    """File of `weft tune`: WEFT_TUNING, or in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WEFT_TUNING") or Path(cache) / "weft" / "tuning.json")


def tuned_tables(path: Path) -> dict[str, Table]:
    """Tables measured on this machine, by the GPU's full name; empty for a file that is not such a table."""
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(gpu): {key: {name: int(value) for name, value in choice.items()} for key, choice in table.items()}
            for gpu, table in tables.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@functools.cache
def table_of(device: torch.device) -> tuple[Table, str]:
    """The choices for a device, and their source."""
    if not is_gpu(device):
        return H200, "the H200's"
    name = device_name(device)
    tuned = tuned_tables(tuning_file())
    if name in tuned:
        return {**H200, **tuned[name]}, "measured on this machine"
    for family, table in SHIPPED.items():
        if family in name:
            return table, f"the {family}'s"
    return H200, "the H200's; `weft tune` would measure this GPU"


def _chosen(operation: str, rank_class: int, device: torch.device, stage_bytes: int = 0) -> dict[str, int]:
    """The choice for an operation, with no more stages than fit; their number changes no result."""
    key = f"{operation}/{class_of(rank_class)}"
    choice = dict(TRYING[key] if key in TRYING else table_of(device)[0][key])
    if stage_bytes:
        choice["num_stages"] = max(2, min(choice["num_stages"], shared_limit(device) // stage_bytes))
    return choice


def shared_limit(device: torch.device) -> int:
    if not is_gpu(device):
        return SHARED_BYTES[9, 0]
    return SHARED_BYTES.get(capability(device), min(SHARED_BYTES.values()))


def shrink_blocks(rank_class: int, num_parts: int, like: torch.Tensor) -> dict[str, int]:
    """For `shrink`, all parts' ranks in one block where they fit."""
    return _row_blocks("shrink", rank_class, rank_blocks(rank_class, num_parts), like)


def shrink_grad_blocks(rank_class: int, like: torch.Tensor) -> dict[str, int]:
    """Block sizes of `shrink_grad`, whose parts have separate outputs; blocks of 128 ranks read these half as often."""
    return _row_blocks("shrink_grad", rank_class, rank_blocks(rank_class, most=128), like)


def _row_blocks(operation: str, rank_class: int, blocks: dict[str, int], like: torch.Tensor) -> dict[str, int]:
    rows = _chosen(operation, rank_class, like.device)["BM"]
    stage = (rows + blocks["BR"]) * REDUCTION * like.element_size()
    return {**blocks, **_chosen(operation, rank_class, like.device, stage), "PIECES": ROW_TILE // rows}


def weight_grad_blocks(rank_class: int, num_parts: int, like: torch.Tensor) -> dict[str, int]:
    """Block sizes of `weight_grad`; one block holds the ranks of all parts where they fit."""
    block = rank_blocks(rank_class, num_parts)["BR"]
    choice = _chosen("weight_grad", rank_class, like.device)
    stage = (choice["BN"] + block) * REDUCTION * like.element_size()
    return {"BR": block, **_chosen("weight_grad", rank_class, like.device, stage)}


def expand_blocks(rank_class: int, device: torch.device) -> dict[str, int]:
    return {**rank_blocks(rank_class), **_chosen("expand", rank_class, device)}


def expand_grad_blocks(rank_class: int, num_parts: int, device: torch.device) -> dict[str, int]:
    """Block sizes of `expand_grad`; one block holds the ranks of all parts where they fit."""
    return {**rank_blocks(rank_class, num_parts), **_chosen("expand_grad", rank_class, device)}


def rank_blocks(rank_class: int, num_parts: int = 1, most: int = 64) -> dict[str, int]:
    """BR, the number of ranks in a block, and RANK_BLOCKS, the number of blocks in the widest rank. A block holds the
    ranks of all parts that one program computes together, up to `most`."""
    block = min(most, max(16, next_power_of_2(num_parts * rank_class)))
    return {"BR": block, "RANK_BLOCKS": cdiv(rank_class, block)}
