"""The bodies that the API takes, as types: OpenAI's fields, and fields of our own for what OpenAI does not have.

A JSON body is read strictly, once the caller is known: with limits of bytes, keys, items and nesting that are checked
before it is parsed, no NaN, no double keys. Parsing takes place in a thread, beside other requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from weft.data.json_rows import parse_json
from weft.errors import DataError
from weft.serve.api.errors import NOT_SERVED, ApiError, from_validation, invalid
from weft.serve.api.service import service_of
from weft.settings import describe
from weft.spec.sampling import LARGEST_BIAS, MOST_BIASES, MOST_LOGPROBS, MOST_STOPS

ShortText = Annotated[StrictStr, Field(min_length=1, max_length=512)]
AnswerLength = Annotated[StrictInt, Field(ge=1, lt=2**31)]
"""Tokens; the service's own limit is lower and has an error of its own."""
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
MAX_PROMPTS = MAX_ANSWERS = 20
"""The most prompts, and answers, of one completion: each waits for the worker like a request of its own."""
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS, allow_inf_nan=False)]
NumLogprobs = Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)]
MOST_SCHEMA_CHARS = 2**16
MAX_KEYS, MAX_ITEMS = 20_000, 2**18
"""The most keys and items of a body; a prompt of token ids has the most items."""
Prompts = (
    Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)
Auto = Literal["auto"]
UNUSED = "Taken, since clients send it, and of no effect."
Unused = Annotated[Any, Field(description=UNUSED)]
DEFAULT_MAX_TOKENS = 256
SUFFIX = r"^[A-Za-z0-9._-]{1,64}$"
MD5 = r"^[0-9a-fA-F]{32}$"
MAX_UPLOAD_PARTS = 1000


def only(*harmless: Any) -> AfterValidator:
    """Validates a field of OpenAI's that we do not serve: only values without an effect pass."""

    def check(value: Any) -> Any:
        if value is None or value in harmless:
            return None
        accepted = " or ".join(json.dumps(item) for item in harmless if item)
        raise PydanticCustomError(NOT_SERVED, "is not available", {"accepted": accepted})

    return AfterValidator(check)


class Body(BaseModel):
    """A body in which every field is known."""

    model_config = ConfigDict(extra="forbid")


class Hyperparameters(Body):
    """Each a number, or `auto` for the rule of the service."""

    n_epochs: Auto | Annotated[StrictInt, Field(ge=1, le=50)] = "auto"
    batch_size: Auto | Annotated[StrictInt, Field(ge=1, le=256)] = "auto"
    learning_rate_multiplier: (
        Auto | Annotated[StrictFloat, Field(gt=0, le=1e4)] | Annotated[StrictInt, Field(gt=0, le=10_000)]
    ) = "auto"


class DpoHyperparameters(Hyperparameters):
    """The same for pairs of answers; `beta` holds the adapter to the backbone."""

    beta: Auto | Annotated[StrictFloat, Field(gt=0, le=2)] | Annotated[StrictInt, Field(gt=0, le=2)] = "auto"


class SupervisedBody(Body):
    """Learning from examples."""

    hyperparameters: Hyperparameters | None = None


class DpoBody(Body):
    """Learning from pairs of a preferred and another answer."""

    hyperparameters: DpoHyperparameters | None = None


class MethodBody(BaseModel):
    """How to learn; `reinforcement` is known and refused."""

    model_config = ConfigDict(extra="allow")
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: SupervisedBody | None = None
    dpo: DpoBody | None = None

    @model_validator(mode="after")
    def _has_its_own_settings_only(self) -> MethodBody:
        for name in ("supervised", "dpo"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"has '{name}', but its type is '{self.type}'; leave one of them out")
        return self


class Wandb(Body):
    """Where Weights & Biases is to show the job."""

    project: ShortText
    name: ShortText | None = None
    entity: ShortText | None = None
    tags: list[Annotated[StrictStr, Field(max_length=64)]] = Field(default=[], max_length=50)


class Integration(Body):
    """A tracker that gets the job's metrics."""

    type: Literal["wandb"]
    wandb: Wandb


class CreateJob(Body):
    """A new fine-tuning job. `lora`, `priority`, `max_steps`, `max_length` and `settings` are ours (`extra_body`)."""

    model: ShortText
    training_file: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    validation_file: Annotated[StrictStr, Field(min_length=1, max_length=64)] | None = None
    suffix: Annotated[StrictStr, Field(pattern=SUFFIX)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**32)] | None = None
    method: MethodBody | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: list[Integration] | None = Field(default=None, max_length=5)
    metadata: dict[str, StrictStr] | None = None
    lora: dict[str, Any] | None = Field(default=None, description="Of the adapter: r, alpha, dropout, target_modules…")
    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] | None = None
    max_steps: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    max_length: Annotated[StrictInt, Field(ge=2, lt=2**31)] | None = None
    settings: dict[str, Any] | None = Field(default=None, description="Any setting of a job in a jobs file.")

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is None:
            return None
        if len(value) > 16:
            raise ValueError(f"has {len(value)} pairs; at most 16 are kept")
        for key, text in value.items():
            if not 0 < len(key) <= 64 or '"' in key or "\\" in key:
                raise ValueError("keys have 1 to 64 characters, without quotes and backslashes")
            if len(text) > 512:
                raise ValueError(f"the value of {key} is longer than 512 characters")
        return value


class ExpiresAfter(Body):
    """When a file is forgotten."""

    anchor: Literal["created_at"]
    seconds: Annotated[StrictInt, Field(ge=3600, le=2_592_000)]


class CreateUpload(Body):
    """A file that will come in parts."""

    bytes: Annotated[StrictInt, Field(ge=1, lt=2**53)]
    filename: ShortText
    mime_type: ShortText
    purpose: ShortText
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Body):
    """The parts of an upload in the order of the file."""

    part_ids: list[Annotated[StrictStr, Field(max_length=64)]] = Field(min_length=1, max_length=MAX_UPLOAD_PARTS)
    md5: Annotated[StrictStr, Field(pattern=MD5)] | None = None


class CreatePermission(Body):
    """Projects that may use a checkpoint; there are none here."""

    project_ids: list[StrictStr]


AdapterName = Annotated[StrictStr, Field(min_length=1, max_length=200)]


class LoadAdapter(Body):
    """An adapter to serve, as vLLM's server takes it."""

    lora_name: AdapterName
    lora_path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    load_inplace: StrictBool = False
    base_model_name: Unused = None
    is_3d_lora_weight: Unused = None


class UnloadAdapter(Body):
    """An adapter that was loaded by name, to serve no longer."""

    lora_name: AdapterName
    lora_int_id: Unused = None


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: StrictBool = False


class _Generate(Body):
    """What both kinds of completion take. What would change an answer and cannot is refused, not passed over."""

    model: ShortText
    max_tokens: AnswerLength | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=4)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Unused = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_ANSWERS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31, description="Ours, as in vLLM; 0 and -1 are all.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="Ours, as in vLLM.")] | None = None
    repetition_penalty: (
        Annotated[float, Field(gt=0, le=100, allow_inf_nan=False, description="Ours, as in vLLM.")] | None
    ) = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_STOPS, description="Ours, as in vLLM.")] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _of_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdecimal() and int(key) < 2**31):
                raise ValueError(f"got {describe(key)}; use the id of a token")
        return value


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: StrictStr


class CalledFunction(BaseModel):
    """The function that a tool call names, with its arguments as JSON."""

    name: ShortText
    arguments: StrictStr


class ToolCall(BaseModel):
    """An assistant's call of a tool."""

    id: Annotated[StrictStr, Field(max_length=512)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: Annotated[StrictStr, Field(max_length=512)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[StrictStr, Field(max_length=512)] | None = None


class JsonSchema(Body):
    """The schema of an answer."""

    name: ShortText
    description: ShortText | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """Text, any JSON object, or JSON that follows a schema. `json_schema` belongs to the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @field_validator("json_schema")
    @classmethod
    def _small(cls, value: JsonSchema | None) -> JsonSchema | None:
        if value is not None and (size := len(json.dumps(value.schema_))) > MOST_SCHEMA_CHARS:
            raise ValueError(f"has a schema of {size:,} characters; use at most {MOST_SCHEMA_CHARS:,}")
        return value


class CreateChat(_Generate):
    """A chat to answer."""

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_completion_tokens: AnswerLength | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    logprobs: StrictBool | None = None
    top_logprobs: NumLogprobs | None = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    metadata: Unused = None
    parallel_tool_calls: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    reasoning_effort: Unused = None
    safety_identifier: Unused = None
    service_tier: Unused = None
    store: Unused = None
    verbosity: Unused = None


class CreateCompletion(_Generate):
    """A text to go on with."""

    prompt: StrictStr | TokenIds | Prompts
    best_of: Annotated[Any, only(1)] = None
    echo: StrictBool | None = None
    logprobs: NumLogprobs | None = None
    suffix: Annotated[Any, only("")] = None


BODIES: tuple[type[BaseModel], ...] = (
    CreateJob,
    CreateUpload,
    CompleteUpload,
    CreatePermission,
    CreateChat,
    CreateCompletion,
    LoadAdapter,
    UnloadAdapter,
)


M = TypeVar("M", bound=BaseModel)
SMALL_BYTES = 2**14
"""A body up to this size is parsed at once, which takes less time than handing it to a thread."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, also one without an end; it never looks back, so that the time is linear."""
_BRACKET = re.compile(r"[\[\]{}]")
_NUL_ESCAPE = re.compile(r"(?<!\\)(\\\\)*\\u0000")


def body_of(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Makes a FastAPI dependency that returns the body as `model`; a wrong body is a 400 that names the field."""

    def parse(data: bytes, nesting: int) -> M:
        try:
            text = data.decode("utf-8")
            if "\0" in text or _NUL_ESCAPE.search(text):
                raise invalid("The body holds a NUL character.", code="invalid_json")
            _check_shape(text, nesting)
            value = parse_json(text, "The body") if text.strip() else {}
        except UnicodeDecodeError:
            raise invalid("The body is not UTF-8.", code="invalid_json") from None
        except DataError as error:
            raise invalid(str(error), code="invalid_json") from None
        if not isinstance(value, dict):
            raise invalid("The body must be a JSON object.", code="invalid_json")
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False), value, list(model.model_fields)) from None

    async def read(request: Request) -> M:
        limits = service_of(request).settings.limits
        data = await _bytes(request, limits.body_bytes)
        if len(data) <= SMALL_BYTES:
            return parse(data, limits.nesting)
        return await run_in_threadpool(parse, data, limits.nesting)

    return read


def _check_shape(text: str, nesting: int) -> None:
    """Refuses too many keys or items and too deep nesting by the marks outside strings, before anything is parsed."""
    # Counting quotes is far cheaper than finding the strings, and those that are escaped are inside one.
    if text.count('"') - text.count('\\"') > 2 * (MAX_KEYS + MAX_ITEMS):
        raise invalid(f"The body has more than {MAX_ITEMS:,} items.", code="invalid_json")
    marks = _STRING.sub("", text)
    num_open = marks.count("[") + marks.count("{")
    for number, most, name in (
        (marks.count(":"), MAX_KEYS, "keys"),
        (marks.count(",") + num_open, MAX_ITEMS, "items"),
    ):
        if number > most:
            raise invalid(f"The body has more than {most:,} {name}.", code="invalid_json")
    depth = 0
    for mark in _BRACKET.findall(marks):
        depth += 1 if mark in "[{" else -1
        if depth > nesting:
            raise invalid(f"The body is nested more than {nesting} deep.", code="invalid_json")


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the OpenAPI description of a body that `body_of` reads."""
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
