"""The dashboard's routes: what is served to whom, and with which headers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from dashboard_stage import Stage
from starlette.testclient import TestClient

import weft.serve.dashboard
from weft.serve.dashboard.overview import NUM_POINTS, SAMPLE_S, History, month_starts
from weft.serve.dashboard.routes import assets
from weft.serve.db.engine import now
from weft.serve.db.leases import steer_workers
from weft.serve.db.tables import WORKERS
from weft.serve.db.tenants import create_key
from weft.serve.db.workers import put_worker

STATIC = Path(weft.serve.dashboard.__file__).parent / "static"


@pytest.fixture
def http(stage: Stage) -> Iterator[TestClient]:
    with TestClient(stage.app) as client:
        yield client


def overview(http: TestClient, key: str, **query: Any) -> dict[str, Any]:
    answer = http.get("/dashboard/overview", params=query, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("path", ["/", "/dashboard/static/app.js"])
def test_page_always_forbids_foreign_and_inline_code(http: TestClient, path: str) -> None:
    """Nothing but the package's own files may run, and no site may frame the page."""
    policy = http.get(path).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy and "http" not in policy
    assert http.get(path).headers["x-content-type-options"] == "nosniff"


def test_files_when_read_hold_no_inline_code_and_no_foreign_address() -> None:
    """The page would work under its own policy, without a network."""
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for path in STATIC.rglob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|\beval\(|localStorage", text), path


def test_files_when_imported_by_each_other_are_all_served(http: TestClient) -> None:
    """Every module, style sheet and picture that a file names is there, as what it is."""
    named = set(re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', (STATIC / "index.html").read_text()))
    for path in STATIC.rglob("*.js"):
        for other in re.findall(r'^import .* from "(\.[^"]+)";$', path.read_text(), re.MULTILINE):
            named.add(f"/dashboard/static/{(path.parent / other).resolve().relative_to(STATIC)}")
    assert len(named) > 12
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for name in named:
        answer = http.get(name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(kinds[Path(name).suffix])


@pytest.mark.parametrize(
    "name",
    [
        *("", "nothing.js", "screens", "app.js/", "/etc/passwd"),
        *("../assets.py", "..%2fassets.py", "%2e%2e/__init__.py", "screens/../../routes.py"),
    ],
)
def test_static_when_the_file_is_not_of_the_page_answers_404(http: TestClient, name: str) -> None:
    """Only files of the package have a name; any other request is a 404 in the API's shape."""
    answer = http.get(f"/dashboard/static/{name}")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_static_when_the_browser_has_the_latest_sends_nothing(http: TestClient) -> None:
    """The same tag is a 304; another one is the whole file."""
    tag = http.get("/dashboard/static/app.js").headers["etag"]
    same = http.get("/dashboard/static/app.js", headers={"if-none-match": tag})
    assert (same.status_code, same.content) == (304, b"")
    assert http.get("/dashboard/static/app.js", headers={"if-none-match": '"x"'}).content == assets()["app.js"].content


def test_overview_without_a_right_key_answers_401(stage: Stage, http: TestClient) -> None:
    """No key, a wrong one and one without the scope see nothing."""
    assert http.get("/dashboard/overview").status_code == 401
    assert http.get("/dashboard/overview", headers={"authorization": "Bearer weft_x"}).status_code == 401
    with stage.database.begin() as tx:
        key = create_key(tx, stage.tenant, scopes=["chat"])
    assert http.get("/dashboard/overview", headers={"authorization": f"Bearer {key}"}).status_code == 403


def test_overview_of_a_tenant_never_names_what_is_another_tenants(stage: Stage, http: TestClient) -> None:
    """A tenant sees its own jobs by name, others as a number, and no address, token or key of anybody."""
    ids = stage.full()
    mine = overview(http, stage.key, months=2)
    worker = mine["workers"][0]
    assert [job["name"] for job in worker["jobs"]] == ["summaries", "extract-fields"]
    assert worker["num_other_jobs"] == 1
    assert worker["time"]["wall_s"] == 4500.0
    span = worker["program"][0]["tokens"]
    assert set(span) == {ids["summaries"], ids["extract-fields"], ""}
    assert mine["queue"] == mine["queue_of_tenant"] == {
        "queued": 1, "running": 2, "paused": 1, "succeeded": 2, "failed": 1, "cancelled": 1
    }  # fmt: skip
    text = http.get("/dashboard/overview?months=2", headers={"authorization": f"Bearer {stage.key}"}).text
    assert not {"tenants", "keys"} & set(mine)
    for secret in (ids["theirs"], "theirs", "rival", stage.worker.address, '"token"', "hash", "loom-1"):
        assert secret not in text
    assert overview(http, stage.rival)["workers"][0]["num_other_jobs"] == 2


def test_overview_when_a_worker_drains_or_is_lost_then_operators_see_it_with_its_machine(
    stage: Stage, http: TestClient
) -> None:
    """A tenant sees the workers that are alive; which machines they are on, and who is lost, is the operator's."""
    stage.beat({})
    stage.beat({}, worker="worker-9f8e7d6c")
    with stage.database.begin() as tx:
        steer_workers(tx, "worker-9f8e7d6c", "drain")
        put_worker(tx, "worker-1a2b3c4a5b6c", base_model="tiny", address=None, token=None, info={}, machine="loom-2")
        tx.execute(sa.update(WORKERS).where(WORKERS.c.machine == "loom-2").values(seen_at=now(tx) - 60))
    seen = overview(http, stage.admin)["workers"]
    assert [(worker["name"], worker["machine"], worker["state"]) for worker in seen] == [
        ("worker 1b2c3d", "loom-1", "alive"),
        ("worker 8e7d6c", "loom-1", "drained"),
        ("worker 4a5b6c", "loom-2", "lost"),
    ]  # fmt: skip
    assert [worker["max_length"] for worker in seen] == [2048, 2048, None]
    mine = overview(http, stage.key)["workers"]
    assert [(worker["machine"], worker["state"]) for worker in mine] == [(None, "alive"), (None, "drained")]


def test_overview_of_an_operator_shows_all_tenants_and_keys_without_secrets(stage: Stage, http: TestClient) -> None:
    """The scope admin adds everybody's jobs, tenants and keys; never a hash, a token or an address."""
    ids = stage.full()
    seen = overview(http, stage.admin, months=2)
    assert [job["name"] for job in seen["workers"][0]["jobs"]] == ["summaries", "extract-fields", "theirs"]
    assert seen["queue"]["running"] == 3 and seen["queue_of_tenant"]["running"] == 2
    assert {tenant["id"]: tenant["num_active_jobs"] for tenant in seen["tenants"]} == {"acme": 4, "rival": 1}
    assert {key["name"] for key in seen["keys"]} == {"laptop", "operator", "theirs"}
    assert all("hash" not in key for key in seen["keys"])
    assert ids["theirs"] in seen["workers"][0]["program"][0]["tokens"]
    text = http.get("/dashboard/overview?months=2", headers={"authorization": f"Bearer {stage.admin}"}).text
    assert stage.worker.address not in text and stage.key not in text


def test_overview_when_the_key_has_only_admin_then_is_shown_and_without_usage_or_admin_403(
    stage: Stage, http: TestClient
) -> None:
    for scopes, status in ((("admin",), 200), (("usage",), 200), (("files", "jobs", "models", "chat"), 403)):
        with stage.database.begin() as tx:
            key = create_key(tx, stage.tenant, "k", scopes)
        answer = http.get("/dashboard/overview", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["is_admin"] == ("admin" in scopes)
        else:
            assert "lacks the scope 'usage' or 'admin'" in answer.json()["error"]["message"]


def test_overview_usage_when_summed_over_months_equals_the_total(stage: Stage, http: TestClient) -> None:
    """The months are a division of what was used, the latest last."""
    stage.full()
    usage = overview(http, stage.key, months=3)["usage"]
    assert usage["totals"] == {
        "trained": 2048 * (120 + 120 + 14 + 73 + 31),
        "evaluated": 0,
        "prompt": 31_000,
        "completion": 52_000,
    }
    assert [month["trained"] for month in usage["months"]] == [0, 0, usage["totals"]["trained"]]
    assert "usage" not in overview(http, stage.key)


@pytest.mark.parametrize("months", ["-1", "25", "x"])
def test_overview_with_months_out_of_range_answers_400(stage: Stage, http: TestClient, months: str) -> None:
    """A wrong parameter is the API's 400 that names it."""
    answer = http.get(f"/dashboard/overview?months={months}", headers={"authorization": f"Bearer {stage.key}"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "months"


def test_overview_without_auth_requests_no_key(tmp_path: Path) -> None:
    """On loopback without auth everybody is the operator of `default`."""
    stage = Stage(tmp_path, auth=False)
    with TestClient(stage.app) as http:
        assert http.get("/dashboard/overview").json()["tenant"]["id"] == "default"
    stage.close()


def test_months_when_the_year_turns_follow_each_other_without_a_gap() -> None:
    """Each month begins where the one before ends; the last one holds the present."""
    at = 1_768_000_000.0  # January 2026
    bounds = month_starts(at, 14)
    assert len(bounds) == 14
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert bounds[-1][0] <= at < bounds[-1][1]
    assert bounds[-1][0] == 1_767_225_600 and bounds[-2][1] - bounds[-2][0] == 31 * 86_400


def test_history_when_workers_report_for_long_keeps_an_hour_of_each() -> None:
    """Old points go, a worker that has not been seen again adds none, one that is gone is forgotten."""
    history = History()
    info = {"tokens_per_s": 5.0, "memory_bytes": 7}
    history.add([{"id": "gone", "seen_at": 0.0, "info": info}])
    for i in range(NUM_POINTS + 10):
        worker = {"id": "w", "seen_at": SAMPLE_S * (i + 1), "info": info}
        history.add([worker])
        history.add([worker])
    points = history.points()
    assert set(points) == {"w"}
    assert len(points["w"]) == NUM_POINTS
    assert points["w"][-1] == {"at": SAMPLE_S * (NUM_POINTS + 10), "tokens_per_second": 5.0, "memory_bytes": 7}
