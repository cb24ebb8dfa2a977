"""Answers that follow a JSON schema: xgrammar, an extra, computes which tokens may come next."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from weft.errors import DataError, JobError, MissingExtraError, first_line, install_command

WHERE = "response_format"
CACHE_BYTES = 2**26
"""Maximum number of bytes of compiled schemas that are kept."""
MOST_COUNT = 256
"""Largest number of characters or items in a schema; each makes the grammar longer."""
MOST_NODES = 512
"""Maximum number of schemas and values of `enum` within a schema."""
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
_NAMED = {"properties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
_OTHERS = {"title", "description", "default", "examples", "$schema", "$id", "format"}
_RANGES = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS = {"type", "enum", "const", "required", "$ref", *_COUNTS, *_NAMED, *_LISTS, *_SCHEMAS, *_OTHERS, *_RANGES}
"""Keywords of OpenAI's structured outputs, without regular expressions."""


class Constraint:
    """The tokens that may come next in one answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, bits_PW: torch.Tensor, index: int) -> None:
        """Sets a bit for each token that may come next, in a row of int32 words."""
        self._matcher.fill_next_token_bitmask(bits_PW, index)

    def take(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise JobError(f"token {token} does not fit the answer's schema.")


class KnownTokens(Constraint):
    """The tokens that may come next in an answer that is written in another process."""

    def __init__(self, constraint: Constraint, vocabulary: int) -> None:
        bits_PW = torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32)
        constraint.fill(bits_PW, 0)
        self._bits_W = bits_PW[0]

    def fill(self, bits_PW: torch.Tensor, index: int) -> None:
        bits_PW[index, : len(self._bits_W)] = self._bits_W


class Grammars:
    """Grammars of schemas for one tokenizer. Several threads may use it."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        """`ends`: tokens that may end an answer once it is complete."""
        try:
            import xgrammar
        except ImportError:
            command = install_command("structured")
            raise MissingExtraError(f"needs xgrammar on the worker; install it with: {command}.", where=WHERE) from None
        if not ends:
            raise DataError("is not possible: the model has no end token.", where=WHERE)
        self._xgrammar = xgrammar
        known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(ends))
        self._compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def constraint(self, schema: Mapping[str, Any], *, is_strict: bool) -> Constraint:
        """`is_strict`: objects have only the properties that the schema lists."""
        check_schema(schema)
        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, strict_mode=is_strict
            )
        except RuntimeError as error:
            raise DataError(f"has a schema that cannot be followed: {first_line(error)}", where=WHERE) from None
        return Constraint(self._xgrammar.GrammarMatcher(compiled))


def check_schema(schema: Any) -> None:
    """DataError for keywords that could take a server unbounded time or memory, and for schemas that are too large."""
    num_nodes = 0
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise DataError("has a schema with a part that is neither an object nor true or false.", where=WHERE)
        for key, value in node.items():
            if key not in _KEYWORDS:
                raise DataError(f"has a schema with {key!r}, which is not available.", where=WHERE)
            if key in _COUNTS and isinstance(value, int | float) and value > MOST_COUNT:
                raise DataError(f"has a schema with {key} {value:,}; use at most {MOST_COUNT}.", where=WHERE)
            if key in _NAMED and isinstance(value, Mapping):
                waiting += value.values()
            elif key in _LISTS and isinstance(value, list):
                waiting += value
            elif key in _SCHEMAS:
                waiting.append(value)
            elif key == "enum" and isinstance(value, list):
                num_nodes += len(value)
        num_nodes += 1
        if num_nodes > MOST_NODES:
            raise DataError(f"has a schema of more than {MOST_NODES} parts and choices.", where=WHERE)


def allowed_tokens(constraints: Sequence[Constraint], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Bool [P, V]: the tokens that may come next in each answer."""
    bits_PW = torch.zeros(len(constraints), -(-vocabulary // 32), dtype=torch.int32)
    for index, constraint in enumerate(constraints):
        constraint.fill(bits_PW, index)
    bits_PW = bits_PW.to(device)
    allowed_PWB = (bits_PW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return allowed_PWB.flatten(1)[:, :vocabulary].bool()
