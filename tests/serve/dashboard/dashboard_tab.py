"""A browser's tab on the dashboard, and what users do in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

PATIENCE_MS = 120_000
"""Of a browser on a machine with other work."""
QUICK = "const later = setTimeout; window.setTimeout = (work, ms, ...more) => later(work, ms / 8, ...more)"
"""The page polls every few seconds; a test has no time to wait for that."""
GOOD = b"".join(json.dumps({"prompt": f"a{i}", "completion": "b"}).encode() + b"\n" for i in range(4))
expect.set_options(timeout=PATIENCE_MS)


def tab_on(browser: Browser, url: str) -> Iterator[Page]:
    """A tab whose errors fail the test: no script may break, and nothing may be forbidden by the page's own policy."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 860})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(QUICK)
    tab = context.new_page()
    broken: list[str] = []
    tab.on("pageerror", lambda error: broken.append(str(error)))
    # The browser notes every refusal by the service; those are shown to the user as sentences.
    tab.on("console", lambda line: broken.append(line.text) if is_ours(line) else None)
    yield tab
    context.close()
    assert broken == []


def is_ours(line: ConsoleMessage) -> bool:
    return line.type == "error" and not re.search("status of (4..|503)", line.text)


def enter(page: Page, key: str, address: str = "#/jobs") -> None:
    page.goto(f"/{address}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".screen")).to_be_visible()


def attach(page: Page, content: bytes, name: str = "train.jsonl", kind: str = "training") -> None:
    page.set_input_files(f"#{kind}-file", files=[{"name": name, "mimeType": "application/json", "buffer": content}])
