"""A job's tensors by name, cut into those of the stages and put together again.

Put together they are what one device would have, so a checkpoint does not tell how many stages wrote it. Flat buffers
follow the order of the layers: a stage's is a run of the whole one's numbers. What an optimizer remembers of single
modules is on the stage that has the module; counters are on all of them. Of twins the first stage's are joined. What
only one stage holds is not cut, however large it is for its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.engine.execute.optimizers.optimizer import PREFIX
from weft.parallel.stages.gradient import JobShare

Tensors = dict[str, torch.Tensor]


def without_tied(tensors: Mapping[str, torch.Tensor], share: JobShare) -> Tensors:
    """The tensors of a stage, but for those of groups that the first stage has as well."""
    return {name: tensor for name, tensor in tensors.items() if _owner(name)[0] not in share.twins}


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
        if module or not tensor.ndim or len(holders) == 1:
            pieces = [tensor] * len(holders)
        else:
            runs = tensor.split([shares[place].run_of(group) for place in holders])
            pieces = [tensor if group in shares[place].twins else run for place, run in zip(holders, runs, strict=True)]
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
        # A part of an adapter is a module and a group of the same name.
        return module in share.modules or (module.partition(".")[0] == group and group in share.sizes)
    return group in share.sizes if group else bool(share.sizes)
