"""Reads a JSON body strictly, once the caller is known: with a limit of bytes and nesting, no NaN, no double keys."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from weft.data.rows.json_rows import parse_json
from weft.errors import DataError
from weft.serve.api.errors import ApiError, from_validation, invalid
from weft.serve.api.service import service_of
from weft.serve.jobs.training_file import depth_of

M = TypeVar("M", bound=BaseModel)
_NUL_ESCAPE = re.compile(r"(?<!\\)(\\\\)*\\u0000")


def body_of(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Makes a FastAPI dependency that returns the body as `model`; a wrong body is a 400 that names the field."""

    async def read(request: Request) -> M:
        limits = service_of(request).settings.limits
        data = await _bytes(request, limits.body_bytes)
        try:
            text = data.decode("utf-8")
            if "\0" in text or _NUL_ESCAPE.search(text):
                raise invalid("The body holds a NUL character.", code="invalid_json")
            value = parse_json(text, "The body") if text.strip() else {}
        except UnicodeDecodeError:
            raise invalid("The body is not UTF-8.", code="invalid_json") from None
        except DataError as error:
            raise invalid(str(error), code="invalid_json") from None
        if not isinstance(value, dict):
            raise invalid("The body must be a JSON object.", code="invalid_json")
        if depth_of(value, limits.nesting) > limits.nesting:
            raise invalid(f"The body is nested more than {limits.nesting} deep.", code="invalid_json")
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False), value, list(model.model_fields)) from None

    return read


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """Returns what the OpenAPI page says about a body that `body_of` reads."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _bytes(request: Request, most: int) -> bytes:
    """Reads the body and counts its bytes as they come, because Content-Length may be wrong."""
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise ApiError(413, f"The body is longer than {most:,} bytes.", code="body_too_large")
        parts.append(chunk)
    return b"".join(parts)
