"""Refuses to continue a job on other inputs than its checkpoint's: another backbone, other data or adapters.

A checkpoint records digests of them. One that an earlier version wrote has fewer, and what it lacks is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import CheckpointError, DataError

MODEL_FILES = ("chat_template", "tokenizer", "config", "weights")
"""Entries of an environment that are digests of a base model's files."""


def check_backbone(was: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """CheckpointError if the environment of a checkpoint has another backbone than the environment `now`."""
    # Without this entry it was trained on unquantised weights.
    was = {"quantize": "none", **was}
    for setting in ("quantize", "dtype"):
        if was.get(setting, now[setting]) != now[setting]:
            found = f"was trained with {setting} {was[setting]}, the backbone is loaded with {now[setting]}"
            raise CheckpointError(f"the checkpoint {found}; a resumed job keeps its backbone.", where=where)
    for name in MODEL_FILES:
        if name in was and name in now and was[name] != now[name]:
            # Without the model's name: a service's tenant may read this, and the name may be a path.
            found = f"the base model has changed since the run began ({name.replace('_', ' ')})"
            raise CheckpointError(f"{found}; put it back, or start a new run.", where=where)


def check_inputs(was: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """DataError or CheckpointError if the state of a checkpoint has other inputs than `JobProgress.inputs` now."""
    if was["data"] != now["data"]:
        raise DataError("train_data is not what the checkpoint was trained on; start a new run.", where=where)
    if "eval_data" in was and was["eval_data"] != now.get("eval_data"):
        raise DataError("eval_data is not what the run began with; put that back, or start a new run.", where=where)
    if was.get("reference") != now.get("reference"):
        found = "the adapter that the job compares with is not the one its checkpoint was trained with"
        raise CheckpointError(f"{found}; put that back, or start a new run.", where=where)
    adapters = was.get("adapter", {}), now.get("adapter", {})
    changed = [name for name in adapters[0].keys() & adapters[1].keys() if adapters[0][name] != adapters[1][name]]
    if changed:
        found = f"init_adapter has another {min(changed)} than when the run began"
        raise CheckpointError(f"{found}; put that adapter back, or start a new run.", where=where)
