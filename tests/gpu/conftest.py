"""What the tests on a GPU share; `make test-gpu` runs them, nothing else collects them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_runs import write_model


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a CUDA device; torch sees none"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def _fresh_gpu_seed() -> None:
    torch.cuda.manual_seed_all(0)
