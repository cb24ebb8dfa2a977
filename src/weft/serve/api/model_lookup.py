"""Finds out which backbone and which adapter the name of a model stands for."""

from __future__ import annotations

from dataclasses import dataclass

from weft.serve.api.service import ApiService
from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound
from weft.serve.records import jobs, models

OWNER = "weft"
"""The owner that the API names for backbones."""


@dataclass(frozen=True)
class ResolvedModel:
    """What the name of a model stands for."""

    base: str
    """The name of the backbone."""
    blob: str | None
    """The adapter's archive; None is the bare backbone."""
    created: int
    owner: str


def resolve_model(tx: Tx, service: ApiService, tenant: str, name: str) -> ResolvedModel:
    """Finds a backbone, or a fine-tuned model or checkpoint of the tenant, by its name."""
    if name in service.settings.base_models:
        return ResolvedModel(name, None, 0, OWNER)
    if ":ckpt-step-" not in name:
        row = models.get_model(tx, tenant, name)
        return ResolvedModel(row["base"], row["blob"], row["created_at"], tenant)
    try:
        row = models.get_checkpoint(tx, tenant, name)
    except NotFound:
        raise missing_model(name) from None
    if row["blob"] is None:
        raise missing_model(name)
    return ResolvedModel(jobs.get_job(tx, tenant, row["job"])["model"], row["blob"], row["created_at"], tenant)


def missing_model(name: str) -> NotFound:
    """Makes the error for a model that is not there or belongs to another tenant."""
    return NotFound(f"The model '{name}' does not exist or you do not have access to it.", where="model")
