"""Fixtures of the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A chat tokenizer: byte-level, ChatML."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def base_tokenizer() -> PreTrainedTokenizerFast:
    """A base model's tokenizer: no chat template, and BOS in front of every text."""
    return make_tokenizer(template=None, adds_bos=True)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (or text, or bytes) to a file beside the test and returns its name."""

    def write_file(name: str, content: list[Any] | str | bytes) -> str:
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
        return name

    return write_file
