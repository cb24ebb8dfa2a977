"""Scripted services: one for every test of a route, two for all tests in the one browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_stage import Busy, House, Live, Stage
from dashboard_tab import tab_on
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The system's own browser; without one, what `playwright install chromium` left."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    stage = Stage(tmp_path_factory.mktemp("house"))
    running = Live(stage)
    yield House(stage, running)
    running.close()
    stage.close()


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    stage = Stage(tmp_path_factory.mktemp("busy"))
    ids = stage.full()
    stage.fill_history()
    running = Live(stage)
    yield Busy(stage, running, ids)
    running.close()
    stage.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For as long as pages are tested: meanwhile its event loop is the only one that this thread can have."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, house: House) -> Iterator[Page]:
    """A tab on the service without workers."""
    yield from tab_on(browser, house.live.url)


@pytest.fixture
def look(browser: Browser, busy: Busy) -> Iterator[Page]:
    """A tab on the service with jobs in every state, which the test leaves as it is."""
    busy.stage.beat(busy.running)
    yield from tab_on(browser, busy.live.url)
