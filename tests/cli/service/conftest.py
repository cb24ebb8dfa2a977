"""Commands of the service set up the logging of a process, which here is that of all tests."""

import logging
from collections.abc import Iterator

import pytest

LOGGERS = ("weft.serve", "uvicorn", "uvicorn.error", "py.warnings")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield
    logging.captureWarnings(False)
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)
