"""A job's tensors by name, cut into those of the stages and put together again.

Put together they are what one device would have, so a checkpoint does not tell how many stages wrote it. Flat buffers
follow the order of the layers: a stage's is a run of the whole one's numbers. What an optimizer remembers of single
modules is on the stage that has the module; counters are on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.adapters.head import HEAD
from weft.execute.optimizers.optimizer import PREFIX
from weft.execute.stages.gradient import JobShare

Tensors = dict[str, torch.Tensor]


def join_state(parts: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """The tensors of a whole job, from those of its stages in their order."""
    found: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(own) if own[0].ndim and len(own) > 1 else own[0] for name, own in found.items()}


def cut_state(tensors: Mapping[str, torch.Tensor], shares: Sequence[JobShare]) -> list[Tensors]:
    """What each stage holds of the tensors of a whole job."""
    parts: list[Tensors] = [{} for _ in shares]
    for name, tensor in tensors.items():
        group, module = _owner(name)
        holders = [place for place, share in enumerate(shares) if _holds(share, group, module)]
        if module or not tensor.ndim:
            pieces = [tensor] * len(holders)
        else:
            pieces = list(tensor.split([shares[place].sizes[group] for place in holders]))
        for place, piece in zip(holders, pieces, strict=True):
            parts[place][name] = piece
    return parts


def _owner(name: str) -> tuple[str, str]:
    """The group that a tensor belongs to, or all of them (empty), and the module if it belongs to one."""
    if not name.startswith(PREFIX):
        return name.partition("_")[2], ""
    group, *module, _ = name.removeprefix(PREFIX).split(".")
    return group, ".".join(module)


def _holds(share: JobShare, group: str, module: str) -> bool:
    if module:
        return module in share.modules or (module.startswith(HEAD) and HEAD in share.sizes)
    return group in share.sizes if group else bool(share.sizes)
