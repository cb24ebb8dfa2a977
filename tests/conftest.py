"""Fixtures and settings of all tests."""

import dataclasses
import functools
import gc
import os

# Kernels run in Triton's interpreter; it must be chosen before anything imports triton. `make test-gpu` compiles them.
os.environ.setdefault("TRITON_INTERPRET", "1")
# As the command does: two test workers share two cores with the processes they start, and threads that wait by spinning
# would slow all of them down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests prepare what they read; those of the cache have one of their own.
os.environ["WEFT_CACHE"] = "off"
# What `weft tune` and `weft doctor --layouts` have measured here decides no test.
os.environ.setdefault("WEFT_TUNING", os.devnull)

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, settings
from triton.runtime import interpreter

# No test loses power. What is no open file still fails.
os.fsync = os.fstat  # type: ignore[assignment]

# Two test workers on two cores: more threads would only wait for each other, and bits depend on the thread count.
torch.set_num_threads(1)


@functools.cache
def _languages(function: Any) -> list[Any]:
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def _prepare_once(function: Any, prepare: Any = interpreter._patch_lang) -> Any:
    """Triton's interpreter goes through all of its language whenever a kernel calls a function, though the launch has
    prepared it: two fifths of the time."""
    is_ready = not any(tl.core.is_builtin(language.load) for language in _languages(function))
    return interpreter._LangPatchScope() if is_ready else prepare(function)


interpreter._patch_lang = _prepare_once
# It computes whether integers overflow, a quarter of the time, and asserts it only when debugging.
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)

# How long an example takes depends more on the machine's other work than on the code.
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    """The CPU's alone: `torch.manual_seed` records where it was called, for the GPU, which takes a millisecond."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """Objects of imported modules live on: without them it is quick to collect garbage, as the engine does when memory
    runs out."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays, so there is no garbage to search for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


LONGEST = ("golden", "engine", "sweeps", "parallel", "model")
"""Folders whose files take longest: they come first, so that no worker is left with one of them at the end."""
SLOW = "benchmarks/"
"""What is below it is about what measures Weft, not about Weft: `make test` runs the tests of the command alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {name: rank for rank, name in enumerate(LONGEST)}

    @functools.cache
    def folder(path: Path) -> str:
        return path.parent.relative_to(Path(__file__).parent).as_posix()

    items.sort(key=lambda item: first.get(folder(item.path).partition("/")[0], len(LONGEST)))
    for item in items:
        if folder(item.path).startswith(SLOW):
            item.add_marker(pytest.mark.slow)
