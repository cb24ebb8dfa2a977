"""Requests made from the OpenAPI page itself, right and wrong, never get a 5xx and conform to the page."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from service_home import Home, make_home

NOT_REQUESTED = ("/v1/chat/completions", "/v1/completions")
"""Without a worker they answer 503 by design; test_api_chat has a worker."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A service with one of everything, so that some of the guessed ids are real."""
    home = make_home(tmp_path_factory.mktemp("fuzzed") / "data")
    home.finish(home.job())
    home.job()
    return home


@pytest.mark.slow
def test_api_when_fuzzed_from_its_schema_then_no_5xx(fuzzed: Home):
    import schemathesis
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    schema = schemathesis.openapi.from_asgi("/openapi.json", fuzzed.app)
    real = {
        "job_id": fuzzed.sdk().fine_tuning.jobs.list().data[0].id,
        "file_id": fuzzed.sdk().files.list().data[0].id,
    }
    num_requests, statuses = 0, set()
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for operation, mode in itertools.product(operations, modes):
        if operation.path in NOT_REQUESTED:
            continue

        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: Any) -> None:
            nonlocal num_requests
            if num_requests % 2 == 0:
                case.path_parameters = {name: real.get(name, value) for name, value in case.path_parameters.items()}
            answer = case.call(headers=fuzzed.headers())
            num_requests += 1
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case.method, case.formatted_path, answer.text)
            case.validate_response(answer, checks=[response_schema_conformance, status_code_conformance])

        with contextlib.suppress(Unsatisfiable):
            # Some operations take anything: nothing is wrong for them.
            fuzz()
    assert num_requests >= 400
    assert {200, 400, 404} <= statuses
