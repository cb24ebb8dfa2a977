"""What an operator wants of workers: to drain, which gives their jobs to others, to take jobs again, or to go.

The wish stands in the worker's row; the worker reads it with its next sign of life. A worker that is lost cannot: it is
only removed, which ends its leases at once.
"""

from __future__ import annotations

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import WORKERS
from weft.serve.errors import NotFound, NotPossible
from weft.serve.jobs.leases import give_up
from weft.serve.records.rows import DbRow
from weft.serve.records.workers import all_workers, is_lost, remove_worker

WISHES = {"drain": "drain", "undrain": None, "remove": "remove"}
"""What may be asked of a worker, and what its row then says."""
SHORTEST_END = 6
"""The fewest letters of the end of a worker's id that stand for the worker."""


def steer_workers(tx: Tx, target: str, wish: str) -> list[DbRow]:
    """Drains, undrains or removes a worker, or all workers of a machine; returns their rows as they were.

    Repeating it is harmless. It raises NotFound if there is no such worker or machine.
    """
    found = find_workers(tx, target)
    at = now(tx)
    lost = [row for row in found if is_lost(row, at)]
    if wish != "remove" and len(lost) == len(found):
        raise NotPossible(f"{target} is lost: it has nothing to {wish}, but it can be removed.", where="worker")
    for row in found:
        if row in lost and wish == "remove":
            give_up(tx, row["id"])
            remove_worker(tx, row["id"])
        elif row not in lost and row["wanted"] != "remove":
            tx.execute(sa.update(WORKERS).where(WORKERS.c.id == row["id"]).values(wanted=WISHES[wish]))
    return found


def find_workers(tx: Tx, target: str) -> list[DbRow]:
    """Finds the worker of this id, or of an id that ends so, or all workers of the machine of this name."""
    rows = all_workers(tx)
    named = [row for row in rows if target in (row["id"], row["machine"])]
    if not named and len(target) >= SHORTEST_END:
        named = [row for row in rows if row["id"].endswith(target)]
    if not named:
        known = sorted({row["machine"] for row in rows if row["machine"]} | {row["id"] for row in rows})
        raise NotFound(
            f"there is no worker or machine {target!r}; there are {', '.join(known) or 'none'}.", where="worker"
        )
    return named
