"""Answers that follow a JSON schema, and schemas that are refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from tiny_models import random_backbone

from weft.engine.inference.generate import Continuation, Passes, Request
from weft.engine.inference.grammar import Grammars, check_schema
from weft.errors import DataError, JobError, MissingExtraError
from weft.model.source import load_tokenizer
from weft.spec.sampling import Decoding

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "is_warp": {"type": "boolean"}},
    "required": ["colour", "is_warp"],
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = load_tokenizer("tiny")
    return Grammars(tokenizer, len(tokenizer) + 3, {tokenizer.eos_token_id})


def test_continuations_when_some_have_a_schema_then_those_follow_it_and_the_others_write_as_alone(grammars):
    tokenizer: Any = load_tokenizer("tiny")
    backbone = random_backbone("llama", vocab_size=len(tokenizer) + 3)
    backbone.model.generation_config.eos_token_id = tokenizer.eos_token_id
    prompts = [[5, 9, 14], [33], [40, 41], [7, 8]]
    warm = Decoding(120, temperature=1.0, repetition_penalty=1.1, logprobs=0)

    def item(index: int, *, follows: bool) -> Continuation:
        constraint = grammars.constraint(SCHEMA, is_strict=True) if follows else None
        return Continuation(Request(prompts[index], seed=index), warm, constraint=constraint)

    def written(items: list[Continuation]) -> list[Continuation]:
        passes = Passes(backbone)
        while going := [each for each in items if not each.is_over]:
            passes.advance(going)
        return items

    together = written([item(index, follows=index % 2 == 0) for index in range(4)])
    for index in (0, 2):
        found = json.loads(tokenizer.decode(together[index].tokens))
        assert found["colour"] in ("red", "green") and found["is_warp"] in (True, False) and len(found) == 2
        assert together[index].reason == "stop" and len(together[index].logprobs) == len(together[index].tokens)
    for index in (1, 3):
        assert together[index].tokens == written([item(index, follows=False)])[0].tokens


def test_constraint_when_a_token_does_not_fit_then_it_is_an_error(grammars):
    tokenizer: Any = load_tokenizer("tiny")
    (brace, letter) = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "{x")
    constraint = grammars.constraint(SCHEMA, is_strict=True)
    bits = torch.zeros(1, -(-(len(tokenizer) + 3) // 32), dtype=torch.int32)
    constraint.fill(bits, 0)
    assert bits[0, brace // 32] >> (brace % 32) & 1 and not bits[0, letter // 32] >> (letter % 32) & 1
    with pytest.raises(JobError, match="does not fit"):
        constraint.take(letter)


def test_schema_when_it_is_none_then_refused_in_one_sentence(grammars):
    with pytest.raises(DataError, match=r"response_format: has a schema that cannot be followed: "):
        grammars.constraint({"type": "nonsense"}, is_strict=True)


REFUSED = [
    (
        {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}},
        "has a schema with 'pattern', which is not available.",
    ),
    ({"items": {"anyOf": [{"minProperties": 9}]}}, "has a schema with 'minProperties', which is not available."),
    ({"prefixItems": [{"maxLength": 10**9}]}, "has a schema with maxLength 1,000,000,000; use at most 256."),
    ({"$defs": {"a": 5}}, "has a schema with a part that is neither an object nor true or false."),
    ({"enum": list(range(512))}, "has a schema of more than 512 parts and choices."),
    ({"properties": {str(i): {} for i in range(512)}}, "has a schema of more than 512 parts and choices."),
]


@pytest.mark.parametrize(("schema", "sentence"), REFUSED)
def test_schema_when_it_could_take_long_then_is_refused(schema, sentence):
    with pytest.raises(DataError) as refused:
        check_schema(schema)
    assert str(refused.value) == f"response_format: {sentence}"


def test_schema_when_it_is_small_then_is_accepted():
    check_schema(SCHEMA)
    check_schema({"properties": {"maxItems": {"type": "integer"}, "pattern": True}, "additionalProperties": False})
    check_schema({"type": "array", "maxItems": 256, "items": {"$ref": "#"}, "default": {"pattern": "(a+)+$"}})


def test_grammars_when_the_extra_is_missing_then_one_sentence_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingExtraError, match=r"response_format: needs xgrammar on the worker; .*\[structured\]"):
        Grammars(None, 10, {1})
