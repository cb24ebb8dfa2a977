"""Rows: pages without gaps, keys that are not kept, sums that count once, and nothing across tenants."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from migrated import audited

from weft.errors import ConfigError
from weft.serve.db import files, tenants, usage, workers
from weft.serve.db.engine import Database, now
from weft.serve.db.jobs import create_job, list_jobs
from weft.serve.db.tables import FILES, IDEMPOTENCY, KEYS, USAGE, WORKERS
from weft.serve.errors import Conflict, NotFound


def new_file(database: Database, tenant: str = "acme", **options: object) -> str:
    with database.begin() as tx:
        row = files.create_file(
            tx, tenant, filename="a", purpose="fine-tune", bytes=10, sha256="0", blob="b", **options
        )  # type: ignore[arg-type]
    return str(row["id"])


def test_key_when_made_then_only_its_hash_is_kept(database: Database):
    with database.begin() as tx:
        key = tenants.create_key(tx, "acme", "laptop", ("files",))
        stored = dict(tx.execute(sa.select(KEYS)).mappings().one())
    id, secret = key.removeprefix("weft_").split("_", 1)
    assert (stored["id"], len(stored["hash"])) == (id, 64)
    assert secret not in str(stored)
    with database.read() as tx:
        found = tenants.find_key(tx, key)
        assert found is not None
        assert (found["tenant"], found["owner"]["id"], found["scopes"]) == ("acme", "acme", ["files"])
        for wrong in (key[:-1], key + "x", key.replace("weft_", "sk_"), "", key.upper(), f"weft_{id}_{'a' * 43}"):
            assert tenants.find_key(tx, wrong) is None
        assert "hash" not in tenants.list_keys(tx)[0]


def test_key_when_revoked_or_its_tenant_disabled_then_opens_nothing(database: Database):
    with database.begin() as tx:
        first, second = tenants.create_key(tx, "acme"), tenants.create_key(tx, "acme")
        tenants.revoke_key(tx, None, tenants.key_id(first))
        tenants.revoke_key(tx, "acme", tenants.key_id(first))
        assert tenants.find_key(tx, first) is None
        assert tenants.find_key(tx, second) is not None
        tenants.update_tenant(tx, "acme", is_disabled=True)
        assert tenants.find_key(tx, second) is None
        with pytest.raises(NotFound):
            tenants.revoke_key(tx, "globex", tenants.key_id(second))
        with pytest.raises(ConfigError, match="accepted are files"):
            tenants.create_key(tx, "acme", scopes=("root",))


@pytest.mark.parametrize("id", ["", "A", "a:b", "-a", "a" * 64, "a/b", "ä"])
def test_tenant_when_its_id_is_bad_then_refused(database: Database, id: str):
    with pytest.raises(ConfigError), database.begin() as tx:
        tenants.create_tenant(tx, id)


@pytest.mark.parametrize("limits", [{"weight": 0}, {"weight": None}, {"max_active_jobs": -1}, {"colour": 1}])
def test_tenant_when_a_limit_is_bad_then_refused(database: Database, limits: dict[str, object]):
    with pytest.raises(ConfigError), database.begin() as tx:
        tenants.update_tenant(tx, "acme", **limits)  # type: ignore[arg-type]


def test_page_when_walked_then_every_row_comes_once_even_if_one_is_deleted_meanwhile(database: Database):
    made = [new_file(database) for _ in range(5)]
    new_file(database, "globex")
    with database.begin() as tx:
        first = files.list_files(tx, "acme", limit=2)
        assert ([row["id"] for row in first.items], first.has_more) == (made[:2:-1], True)
        files.delete_file(tx, "acme", made[3])
        rest = files.list_files(tx, "acme", after=made[3], limit=3)
        assert ([row["id"] for row in rest.items], rest.has_more) == (made[2::-1], False)
        with pytest.raises(NotFound):
            files.list_files(tx, "globex", after=made[0])


def test_file_when_expired_then_is_gone(database: Database):
    id = new_file(database, expires_in_s=3600)
    with database.begin() as tx:
        assert files.get_file(tx, "acme", id)["expires_at"]
        tx.execute(sa.update(FILES).values(expires_at=5))
        assert files.list_files(tx, "acme").items == []
        with pytest.raises(NotFound):
            files.get_file(tx, "acme", id)


def test_usage_when_reported_twice_then_counts_once(database: Database):
    with database.begin() as tx:
        for _ in range(2):
            usage.add_usage(tx, "acme", "req_1", kind="prompt", tokens=5, model="tiny")
        usage.add_usage(tx, "acme", "req_1", kind="completion", tokens=2, model="tiny")
        usage.add_usage(tx, "globex", "req_2", kind="prompt", tokens=100, model="tiny")
        assert usage.usage_of(tx, "acme")["totals"] == {"trained": 0, "evaluated": 0, "prompt": 5, "completion": 2}


def test_usage_when_requests_of_past_days_are_folded_then_no_figure_of_a_day_changes(database: Database):
    with database.begin() as tx:
        today = int(now(tx)) // usage.DAY_S * usage.DAY_S
        for index in range(60):
            # Ten days of two tenants, three requests each: of one model, of the same one, and of another.
            tenant, model = ("acme", "globex")[index % 2], ("tiny", "tiny", "other")[index // 20]
            usage.add_answer(tx, tenant, f"req_{index}", model=model, prompt=index, completion=1)
            at = today - index // 2 % 10 * usage.DAY_S + index * 1000
            tx.execute(sa.update(USAGE).where(USAGE.c.request == f"req_{index}").values(created_at=at))
        usage.add_usage(tx, "acme", "ftjob-a:1", kind=usage.EVALUATED, tokens=5, job="ftjob-a")
        tx.execute(sa.update(USAGE).where(USAGE.c.kind == usage.EVALUATED).values(created_at=5))

    def figures() -> list[dict[str, Any]]:
        windows = [(None, None), *((today - n * usage.DAY_S, today - (n - 1) * usage.DAY_S) for n in range(10))]
        with database.read() as tx:
            found = [
                usage.usage_of(tx, name, start=start, end=end) for name in ("acme", "globex") for start, end in windows
            ]
        return [{**each, "by_model": sorted(map(str, each["by_model"]))} for each in found]

    before = figures()
    # The two requests of one model on each of eight days, prompts and answers of two tenants.
    assert usage.fold_usage(database) == 8 * 2 * 2 * 2
    assert figures() == before
    assert usage.fold_usage(database) == 0
    with database.begin() as tx:
        usage.add_answer(tx, "acme", "late", model="tiny", prompt=3, completion=1)
        tx.execute(sa.update(USAGE).where(USAGE.c.request == "late").values(created_at=today - 5 * usage.DAY_S))
    late = figures()
    assert usage.fold_usage(database) == 2 * 2 and figures() == late != before


def test_idempotency_when_old_then_the_key_is_free_again(database: Database):
    with database.begin() as tx:
        assert tenants.take_key(tx, "acme", "k", "h1", "a") is None
        assert tenants.take_key(tx, "acme", "k", "h1", "b") == "a"
        assert tenants.find_key_use(tx, "globex", "k", "h1") is None
        with pytest.raises(Conflict):
            tenants.take_key(tx, "acme", "k", "h2", "b")
        tx.execute(sa.update(IDEMPOTENCY).values(created_at=5))
        assert tenants.take_key(tx, "acme", "k", "h2", "b") is None


def test_checkpoint_when_looked_up_by_id_or_model_then_only_its_tenant_finds_it(database: Database):
    with database.begin() as tx:
        first = files.add_checkpoint(tx, "acme", "j", 5, model="m:ckpt-step-5", metrics={"x": 1}, blob="b")
        for name in (first["id"], "m:ckpt-step-5"):
            assert files.get_checkpoint(tx, "acme", name)["step"] == 5
            with pytest.raises(NotFound):
                files.get_checkpoint(tx, "globex", name)


def test_model_when_deleted_then_its_bytes_no_longer_count(database: Database):
    new_file(database)
    with database.begin() as tx:
        files.create_model(tx, "acme", "ft:x", job="j", base="tiny", blob="b", bytes=7)
        assert files.stored_bytes(tx, "acme") == 17
        files.delete_model(tx, "acme", "ft:x")
        assert files.stored_bytes(tx, "acme") == 10
        assert files.list_models(tx, "acme") == []
    assert files.model_name("tiny", "acme", None, "ftjob-abcdefghijkl") == "ft:tiny:acme::abcdefgh"


def test_jobs_when_filtered_by_metadata_then_only_those(database: Database):
    with database.begin() as tx:
        made = {}
        for name, metadata in (("a", {"k": "1", "odd key.[0]": "x"}), ("b", {"k": "2"}), ("c", None), ("d", {})):
            made[create_job(tx, "acme", model="m", training_file="f", settings={}, metadata=metadata)["id"]] = name

        def names(**options: object) -> str:
            return "".join(made[row["id"]] for row in list_jobs(tx, "acme", **options).items)  # type: ignore[arg-type]

        assert names() == "dcba"
        assert names(metadata={"k": "1"}) == "a"
        assert names(metadata={"odd key.[0]": "x", "k": "1"}) == "a"
        assert names(metadata={"k": "3"}) == ""
        assert names(no_metadata=True) == "dc"


def test_worker_when_silent_then_is_not_alive(database: Database):
    with database.begin() as tx:
        for _ in range(2):
            workers.put_worker(tx, "w", base_model="tiny", address="http://x", token="t", info={"a": 1})
        assert [w["id"] for w in workers.live_workers(tx, "tiny")] == ["w"]
        assert workers.live_workers(tx, "other") == []
        tx.execute(sa.update(WORKERS).values(seen_at=5.0))
        assert workers.live_workers(tx) == []
        workers.remove_worker(tx, "w")
        assert tx.execute(sa.select(WORKERS)).all() == []


def test_audit_when_noted_then_newest_first_and_own_only(database: Database):
    with database.begin() as tx:
        tenants.add_audit(tx, "acme", "a", "1", data={"x": 1})
        tenants.add_audit(tx, "acme", "b", "2")
        tenants.add_audit(tx, "globex", "c", "3")
        assert [row["action"] for row in audited(tx, "acme")] == ["b", "a"]
