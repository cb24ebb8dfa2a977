"""The short way and the long way give the same answer."""

from __future__ import annotations

from typing import Any

import pytest
from service_home import Home

from weft.serve.api import app
from weft.serve.db import tenants

JOBS = "/v1/fine_tuning/jobs"
LONG = "?x=1"
"""A query that means nothing: with one, the framework finds the route."""


@pytest.fixture
def ways(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were answered the short way."""
    taken: list[str] = []
    real = app._answer

    async def note(request: Any, job_id: str | None) -> Any:
        taken.append(request.url.path)
        return await real(request, job_id)

    monkeypatch.setattr(app, "_answer", note)
    return taken


def content_of(answer: Any) -> tuple[int, bytes, dict[str, str]]:
    """All of an answer but what differs from request to request."""
    return answer.status_code, answer.content, {k: v for k, v in answer.headers.items() if k != "x-request-id"}


@pytest.mark.parametrize("path", [JOBS, JOBS + "/{job}", JOBS + "/ftjob-none", JOBS + "/a%2Fb"])
@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_poll_when_plain_then_is_answered_as_with_a_query_that_means_nothing(home, ways, path, tenant):
    path = path.format(job=home.job("acme"))
    short, long = home.call("GET", path, tenant), home.call("GET", path + LONG, tenant)
    assert content_of(short) == content_of(long)
    assert len(ways) == (0 if "%2F" in path else 1)


@pytest.mark.parametrize("path", [JOBS, JOBS + "/ftjob-none"])
def test_poll_when_the_key_is_missing_wrong_or_too_weak_then_is_refused_as_the_long_way(home, ways, path):
    with home.database.begin() as tx:
        weak = tenants.create_key(tx, "acme", scopes=("files",))
    for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {weak}"}):
        short, long = (home.http.get(path + query, headers=headers) for query in ("", LONG))
        assert content_of(short) == content_of(long)
        assert short.status_code in (401, 403)
    assert len(ways) == 3


def test_poll_when_over_the_rate_then_both_ways_count_and_refuse(home, ways):
    home.limit(max_requests_per_minute=2)
    answers = [home.call("GET", JOBS + query) for query in ("", LONG, "", LONG)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded" and answers[2].headers["retry-after"]


def test_metrics_when_polled_both_ways_then_count_under_the_same_route(home, ways):
    job = home.job()
    for path in (JOBS, JOBS + LONG, f"{JOBS}/{job}", f"{JOBS}/{job}{LONG}"):
        assert home.call("GET", path).status_code == 200
    assert len(ways) == 2
    text = home.call("GET", "/metrics").text
    for route in (JOBS, JOBS + "/{job_id}"):
        assert f'weft_http_requests_total{{method="GET",route="{route}",status="200"}} 2.0' in text


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "HEAD"])
def test_other_methods_when_sent_to_the_same_paths_then_take_the_long_way(home, ways, method):
    home.call(method, f"{JOBS}/ftjob-none")
    assert ways == []
