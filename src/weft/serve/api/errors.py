"""Turns every error, whatever raised it, into OpenAI's `{"error": {"message", "type", "param", "code"}}`.

What pydantic finds wrong with a request becomes one sentence: the field, what we got and what we accept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from weft.errors import ConfigError, DataError, StorageError, WeftError, did_you_mean
from weft.serve.errors import Busy, Conflict, Damaged, NotFound, NotPossible, OverLimit
from weft.settings import describe

LOG = logging.getLogger("weft.serve")
RETRY_AFTER_S = 2
ROUTES = "here are files, uploads, fine_tuning/jobs, models, chat/completions, completions and usage"
HIDDEN = "The server had an error while processing your request; quote the x-request-id to its operator."

DAMAGED = "What is stored is damaged or gone; upload the file or train the model again, or have a backup restored."


class ApiError(Exception):
    """An answer with a status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code, **more}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None, **more: Any) -> ApiError:
    """Makes a 400: the request is wrong, and sending it again will not help."""
    return ApiError(400, message, param=param, code=code, **more)


def too_many(message: str, code: str, *, retry_after_s: int | None, type: str = "requests") -> ApiError:
    """Makes a 429; without `retry_after_s` the SDK does not try again."""
    headers = {"x-should-retry": "false"} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ApiError(429, message, code=code, type=type, headers=headers)


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Makes a 503: the same request may succeed a little later."""
    return ApiError(503, message, code=code, type="server_error", headers={"retry-after": str(retry_after_s)})


def install(app: FastAPI) -> None:
    for kind in (ApiError, WeftError):
        app.add_exception_handler(kind, lambda request, error: as_api_error(error).response())
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def as_api_error(error: Exception) -> ApiError:
    """Returns what an error of Weft means to the client; any other error is a 500 that hides what happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotFound):
        code = "model_not_found" if error.where == "model" else None
        return ApiError(404, error.message, param=error.where, code=code)
    if isinstance(error, NotPossible):
        return invalid(error.message, error.where, error.code)
    if isinstance(error, Conflict):
        return ApiError(409, error.message, code=error.code, headers={"x-should-retry": "false"})
    if isinstance(error, OverLimit):
        return too_many(error.message, error.code, retry_after_s=None, type="insufficient_quota")
    if isinstance(error, Busy):
        return unavailable(error.message, error.code)
    if isinstance(error, StorageError):
        LOG.error("storage", extra={"fields": {"error": str(error)}})
        return unavailable("The file store cannot be written at the moment; try again later.", error.code, 30)
    if isinstance(error, Damaged):
        LOG.error("stored data is damaged", extra={"fields": {"error": str(error)}})
        headers = {"x-should-retry": "false"}
        return ApiError(500, DAMAGED, code=error.code, type="server_error", headers=headers)
    if isinstance(error, ConfigError | DataError):
        text = f"{error.message} {error.hint}" if error.hint else error.message
        return invalid(f"{error.where}: {text}" if error.where else text, error.where, error.code)
    return ApiError(500, HIDDEN, type="server_error")


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


def from_validation(problems: Any, body: Any = None, known: Sequence[str] = ()) -> ApiError:
    """Makes a 400 of the first of pydantic's problems; `body` is what was sent, `known` are the names of its fields."""
    first = _param(problems[0], body)
    # A field with several accepted types has a problem for each; the deepest belongs to the type that was sent.
    below = [p for p in problems if _is_below(_param(p, body), first)]
    problem = max(below, key=lambda p: (_param(p, body) or "").count("."))
    param, kind, context = _param(problem, body), problem.get("type"), problem.get("ctx") or {}
    if kind == "extra_forbidden":
        hint = did_you_mean(str(param), known) if "." not in str(param) else None
        message = f"Unrecognized request argument supplied: {param}" + (f". {hint}" if hint else "")
        return invalid(message, param, "unknown_parameter")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == NOT_SERVED:
        only = f"got {_got(problem)}; only {context['accepted']} is available here."
        message = f"Invalid value for '{param}': {only}" if context["accepted"] else f"'{param}' is not available here."
        return invalid(f"{message} Leave it out.", param, "unsupported_parameter")
    message = _message([p for p in problems if _param(p, body) == param])
    return invalid(f"Invalid value for '{param}': {message}" if param else message, param, "invalid_value")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path})"
        is_below = request.url.path.startswith("/v1")
        message += f"; {ROUTES}." if is_below else "; the API is below /v1, which belongs in the base URL."
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
    else:
        message = str(error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


NOT_SERVED = "not_served"
"""The type of error for a field that OpenAI has and we do not; its context has the values we accept anyway."""
_OF_A_KIND = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_WITHIN = {
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge:,}",
    "greater_than": "more than {gt:,}",
    "less_than_equal": "at most {le:,}",
    "less_than": "less than {lt:,}",
    "too_short": "at least {min_length:,}",
    "too_long": "at most {max_length:,}",
    "string_too_short": "text of {min_length:,} or more characters",
    "string_too_long": "text of at most {max_length:,} characters",
}
_PATTERNS = {
    "^[A-Za-z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, dashes and underscores",
    "^[0-9a-fA-F]{32}$": "32 hexadecimal digits",
}


def _message(problems: Sequence[Any]) -> str:
    if problems[0].get("type") == "value_error":
        return f"{problems[0]['msg'].removeprefix('Value error, ')}."
    # Where a value has one of the accepted types, the other types are not worth mentioning.
    fitting = [p for p in problems if p.get("type") not in _OF_A_KIND]
    if any(p.get("type") != "literal_error" for p in fitting):
        problems = fitting
    accepted = list(dict.fromkeys(_accepted(problem) for problem in problems))
    if "a number" in accepted and "a whole number" in accepted:
        accepted.remove("a whole number")
    *others, last = accepted
    return f"got {_got(problems[0])}; use {', '.join(others)}{' or ' if others else ''}{last}."


def _accepted(problem: Any) -> str:
    kind, given = problem.get("type"), problem.get("ctx") or {}
    context = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in given.items()}
    if kind in _OF_A_KIND:
        return _OF_A_KIND[kind]
    if kind == "string_pattern_mismatch":
        return _PATTERNS[str(context["pattern"])]
    if kind in _WITHIN:
        return _WITHIN[kind].format(**context)
    return str(problem.get("msg", "something else"))


def _got(problem: Any) -> str:
    value = problem.get("input")
    if problem.get("type") in ("too_short", "too_long"):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value):,}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "an object" if isinstance(value, Mapping) else describe(value)


def _is_below(param: str | None, other: str | None) -> bool:
    return param == other or (param or "").startswith(f"{other}.")


def _param(problem: Any, body: Any) -> str | None:
    """Returns the path to a field, without the names of its types, which pydantic adds where there are several."""
    parts = list(problem.get("loc", ()))
    # FastAPI puts where a field is first, but a field of the body may have the same name.
    if parts and parts[0] in ("body", "query", "path", "header") and not (isinstance(body, dict) and parts[0] in body):
        parts = parts[1:]
    if body is None:
        return ".".join(map(str, parts)) or None
    found = []
    for index, part in enumerate(parts):
        is_there = part in body if isinstance(body, dict) else _has(body, part)
        if is_there:
            body = body[part]
        if is_there or (problem.get("type") == "missing" and index == len(parts) - 1):
            found.append(str(part))
    return ".".join(found) or None


def _has(items: Any, index: Any) -> bool:
    return isinstance(items, list) and isinstance(index, int) and index < len(items)
