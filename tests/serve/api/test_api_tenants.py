"""No tenant sees anything of another's: every route of the app, with every kind of key that must not open it.

The routes come from the app itself; one without an entry in `FILLED`, or one that requires no scope, fails here.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi.routing import APIRoute
from service_home import Home

from weft.serve.db import tenants
from weft.serve.db.tenants import revoke_key

OPEN = {"/healthz", "/readyz", "/", "/dashboard/static/{name:path}"}
"""Routes that need no key."""
SCOPES = {
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/fine_tuning/jobs": "jobs",
    "/v1/fine_tuning/checkpoints": "models",
    "/v1/models": "models",
    "/v1/chat": "chat",
    "/v1/completions": "chat",
    "/v1/usage": "usage",
    "/v1/workers": "admin",
    "/v1/load_lora_adapter": "admin",
    "/v1/unload_lora_adapter": "admin",
    "/metrics": "admin",
    "/dashboard/overview": "usage admin",
}
"""The scope a route needs, or the scopes of which it needs one, by how its path starts."""
UPLOAD = {"bytes": 3, "filename": "a.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune"}
BODIES: dict[str, Any] = {
    "/v1/uploads": UPLOAD,
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["{part_id}"]},
    "/v1/fine_tuning/jobs": {"model": "tiny", "training_file": "{file_id}"},
    "/v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"project_ids": ["p"]},
    "/v1/chat/completions": {"model": "{model}", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "{model}", "prompt": "x"},
}


def flat_routes(app: Any) -> list[APIRoute]:
    found: list[APIRoute] = []

    def walk(routes: Any) -> None:
        for route in routes:
            if isinstance(route, APIRoute):
                found.append(route)
            elif hasattr(route, "original_router"):
                walk(route.original_router.routes)

    walk(app.routes)
    return found


def scopes_of(route: APIRoute) -> list[str]:
    dependencies = vars(route)["depend" + "ant"].dependencies
    return [scope for d in dependencies if hasattr(d.call, "scopes") for scope in d.call.scopes]


def all_calls(home: Home) -> list[tuple[str, str]]:
    return [(method, route.path) for route in flat_routes(home.app) for method in sorted(route.methods)]


def filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)(:path)?\}", lambda m: values[m[1]], text)


@pytest.fixture
def owned(home: Home) -> dict[str, str]:
    """One of everything, of the tenant `acme`."""
    file = home.upload()
    job = home.job(file=file)
    model = home.finish(job)
    checkpoint = home.call("GET", f"/v1/fine_tuning/jobs/{job}/checkpoints").json()["data"][0]["id"]
    upload = home.call("POST", "/v1/uploads", json=UPLOAD).json()["id"]
    part = home.call("POST", f"/v1/uploads/{upload}/parts", files={"data": b"{}\n"}).json()["id"]
    made = {"file_id": file, "job_id": job, "model": model, "checkpoint": checkpoint, "upload_id": upload}
    return {**made, "part_id": part, "permission_id": "cp_1", "worker": "worker-7"}


def send(home: Home, method: str, path: str, values: dict[str, str], headers: dict[str, str]) -> Any:
    body = BODIES.get(path)
    options: dict[str, Any] = {}
    if method == "POST" and body is not None:
        options["json"] = json.loads(filled(json.dumps(body), values))
    elif method == "POST" and path == "/v1/files":
        options = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "fine-tune"}}
    elif method == "POST" and path.endswith("/parts"):
        options = {"files": {"data": ("a.jsonl", b"{}\n")}}
    return home.http.request(method, filled(path, values), headers=headers, **options)


def test_routes_when_listed_then_all_but_the_open_ones_require_a_scope(home: Home):
    routes = flat_routes(home.app)
    assert len(routes) >= 22
    for route in routes:
        expected = [s for start, scopes in SCOPES.items() if route.path.startswith(start) for s in scopes.split()]
        assert scopes_of(route) == ([] if route.path in OPEN else expected), route.path


@pytest.mark.parametrize("kind", ["none", "empty", "garbage", "wrong secret", "unknown id", "revoked", "disabled"])
def test_every_route_when_the_key_is_bad_then_401_and_one_body(home: Home, owned: dict[str, str], kind: str):
    key = home.keys["acme"]
    if kind == "revoked":
        with home.database.begin() as tx:
            key = tenants.create_key(tx, "acme")
            revoke_key(tx, "acme", tenants.key_id(key))
    if kind == "disabled":
        home.limit("acme", is_disabled=True)
    id, secret = key.split("_", 2)[1:]
    texts = {
        "empty": "Bearer ",
        "garbage": "Bearer sk-nothing",
        "wrong secret": f"Bearer weft_{id}_{'A' * 43}",
        "unknown id": f"Bearer weft_{'0' * 12}_{secret}",
    }
    headers = {} if kind == "none" else {"authorization": texts.get(kind, f"Bearer {key}")}
    seen = set()
    calls = [(m, p) for m, p in all_calls(home) if p not in OPEN]
    for method, path in calls:
        answer = send(home, method, path, owned, headers)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["x-request-id"].startswith("req_")
        seen.add(answer.text)
    assert len(seen) == 1
    assert secret not in seen.pop()


def test_every_route_when_the_object_is_foreign_then_answers_as_if_it_were_missing(home: Home, owned: dict[str, str]):
    missing = {
        "file_id": "file-" + "0" * 24,
        "job_id": "ftjob-" + "0" * 24,
        "model": "ft:tiny:acme::00000000",
        "checkpoint": "ftckpt_" + "0" * 24,
        "upload_id": "upload_" + "0" * 24,
        "part_id": "part_" + "0" * 24,
        "permission_id": "cp_1",
        "worker": "worker-8",
    }
    num_requests = 0
    for method, path in all_calls(home):
        body = json.dumps(BODIES.get(path, "")) if method == "POST" else ""
        if path in OPEN or not re.search(r"\{\w+", path + body):
            continue
        num_requests += 1
        theirs = send(home, method, path, owned, home.headers("globex"))
        of_none = send(home, method, path, missing, home.headers("globex"))
        assert theirs.status_code == of_none.status_code, (method, path, theirs.text)
        assert theirs.status_code in (400, 404), (method, path, theirs.text)

        def plain(text: str, values: dict[str, str]) -> str:
            for name, value in values.items():
                text = text.replace(value, f"<{name}>")
            return text

        assert plain(theirs.text, owned) == plain(of_none.text, missing), (method, path)
    assert num_requests >= 20
    # And nothing happened to what is acme's.
    assert home.sdk().fine_tuning.jobs.retrieve(owned["job_id"]).status == "succeeded"
    assert home.sdk().models.retrieve(owned["model"])
    assert home.sdk().files.retrieve(owned["file_id"])
    assert home.sdk().uploads.complete(owned["upload_id"], part_ids=[owned["part_id"]]).status == "completed"


def test_lists_when_another_tenant_requests_them_then_hold_nothing_of_mine(home: Home, owned: dict[str, str]):
    with home.database.begin() as tx:
        # `admin` is for the operator, who sees all tenants.
        headers = {"authorization": f"Bearer {tenants.create_key(tx, 'globex')}"}
    paths = ("/v1/files", "/v1/fine_tuning/jobs", "/v1/models", "/v1/usage", "/dashboard/overview?months=2")
    for path in paths:
        text = home.http.get(path, headers=headers).text
        assert "acme" not in text
        assert not any(value in text for name, value in owned.items() if name not in ("permission_id", "worker"))
    for name, path in (("file_id", "/v1/files"), ("job_id", "/v1/fine_tuning/jobs")):
        assert home.call("GET", f"{path}?after={owned[name]}", "globex").status_code == 404


def test_every_route_when_the_scope_is_missing_then_403(home: Home, owned: dict[str, str]):
    for lacking in {tuple(scopes_of(route)) for route in flat_routes(home.app)} - {()}:
        others = [other for other in tenants.SCOPES if other not in lacking]
        with home.database.begin() as tx:
            key = tenants.create_key(tx, "acme", scopes=others)
        for route in flat_routes(home.app):
            if lacking == tuple(scopes_of(route)):
                method = min(route.methods)
                answer = send(home, method, route.path, owned, {"authorization": f"Bearer {key}"})
                assert answer.status_code == 403, route.path
                assert answer.json()["error"]["code"] == "missing_scope"


def test_ids_when_guessed_then_none_opens(home: Home, owned: dict[str, str]):
    id = owned["job_id"]
    for guess in (id[:-1], id + "0", id.swapcase(), id + "%20", "..%2f" + id, "'; drop table jobs; --", "*", "%25"):
        answer = home.call("GET", f"/v1/fine_tuning/jobs/{guess}", "globex")
        assert answer.status_code == 404


def test_without_auth_when_not_on_loopback_then_refused(tmp_path: Any):
    from weft.errors import ConfigError
    from weft.serve.settings import Settings

    with pytest.raises(ConfigError, match="no-auth"):
        Settings(data_dir=tmp_path, host="0.0.0.0", auth=False)
    assert not Settings(data_dir=tmp_path, auth=False).auth


def test_without_auth_when_requested_then_every_caller_is_default(tmp_path: Any):
    from service_home import make_home

    home = make_home(tmp_path, auth=False)
    with home.http:
        answer = home.http.get("/v1/usage")
        assert answer.json()["organization_id"] == "default"
    home.database.close()
