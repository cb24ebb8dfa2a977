"""The dashboard of a service with jobs in every state, in a real browser; no test changes them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboard_stage import ANSWER, Busy
from dashboard_tab import GOOD, attach, enter
from playwright.sync_api import Browser, Page, expect

from weft.serve.db.tenants import key_id


def test_jobs_when_there_are_some_show_state_progress_and_curve(look: Page, busy: Busy) -> None:
    """Every job has its state; those that train have a curve; a click on a state leaves only its jobs."""
    enter(look, busy.stage.key)
    rows = look.locator("table.jobs tbody tr")
    expect(rows).to_have_count(8)
    row = rows.filter(has_text="summaries")
    expect(row.locator(".badge")).to_have_text("running")
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "46")
    expect(row.locator("svg.spark path")).to_have_attribute("d", re.compile("M.*L"))
    expect(look.get_by_text("theirs")).to_have_count(0)
    look.get_by_role("button", name=re.compile("^failed")).click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("broken")


def test_jobs_when_compared_have_their_curves_on_the_same_axes(look: Page, busy: Busy) -> None:
    """Each chart has a curve of every chosen job; of the settings only those that differ are listed."""
    enter(look, busy.stage.key)
    for name in ("support-tone", "extract-fields"):
        look.get_by_label(f"Compare {name}").check()
    look.get_by_role("link", name="Compare 2").click()
    charts = look.locator(".overlay .plot svg")
    expect(charts).to_have_count(4)
    for i in range(4):
        expect(charts.nth(i).locator("path.curve")).to_have_count(2)
    expect(look.get_by_role("row", name=re.compile("support-tone.*succeeded"))).to_contain_text("120 of 120")
    differing = look.get_by_role("table", name="Settings that differ").locator("tbody tr")
    expect(differing).to_have_count(1)
    expect(differing.locator("th")).to_have_text("training file")
    # Where one of them has no steps any more, only the other one is read.
    charts.first.hover(position={"x": 70, "y": 90})
    expect(look.locator(".reading").first).to_contain_text("extract-fields")
    charts.first.hover(position={"x": 500, "y": 90})
    expect(look.locator(".reading").first).to_contain_text("support-tone")
    expect(look.locator(".reading").first).not_to_contain_text("extract-fields")


def test_checkpoints_that_are_not_there_are_awaited_only_while_a_job_may_write_some(look: Page, busy: Busy) -> None:
    """A job that failed without a checkpoint has none, and no "yet"; one that waits has none yet."""
    enter(look, busy.stage.key, f"#/jobs/{busy.ids['broken']}")
    expect(look.locator(".notice").last).to_have_text("This job has no checkpoints.")
    look.goto(f"/#/jobs/{busy.ids['waiting']}")
    expect(look.locator(".notice").last).to_have_text("No checkpoint has been written yet.")
    expect(look.locator(".hollow").first).to_have_text("The first step has not been done yet.")
    look.goto(f"/#/jobs/{busy.ids['stopped']}")
    expect(look.locator(".hollow").first).to_have_text("No step was done.")


def test_chat_with_an_adapter_streams_beside_the_base_model(look: Page, busy: Busy) -> None:
    """Both answers grow word by word; each side's history is its own."""
    goes_on = busy.stage.worker.goes_on
    goes_on.clear()
    enter(look, busy.stage.key, "#/chat")
    look.get_by_label("Message", exact=True).fill("What is a weft?")
    look.keyboard.press("Enter")
    answer = look.locator(".answer:not(.base) .answer-text")
    expect(answer).to_have_text(re.compile("^The warp stays ?$"))
    expect(look.get_by_role("button", name="Stop")).to_be_visible()
    goes_on.set()
    expect(answer).to_have_text(ANSWER)
    expect(look.locator(".answer.base .answer-text")).to_have_text("I do not know what a loom is.")
    expect(look.get_by_text("12 tokens in")).to_be_visible()
    sent: list[dict[str, Any]] = []
    look.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    goes_on.clear()
    look.get_by_label("Message", exact=True).fill("And a warp?")
    look.keyboard.press("Enter")
    expect(look.locator(".turn")).to_have_count(2)
    look.get_by_role("button", name="Stop").click()
    expect(look.get_by_text("Stopped.")).to_have_count(2)
    goes_on.set()
    own = {body["model"].split(":")[0]: body["messages"][1]["content"] for body in sent}
    assert own == {"ft": ANSWER, "tiny": "I do not know what a loom is."}


def test_operations_show_workers_queue_and_program(look: Page, busy: Busy) -> None:
    """The machine, its speed over time and whose tokens it trains; another tenant's job has no name here."""
    enter(look, busy.stage.key, "#/operations")
    expect(look.locator(".tile").nth(1)).to_have_text("tokens per second18.4 kall workers and tenants")
    expect(look.locator(".tile").nth(3)).to_have_text("your jobs2 running1 waiting; beside 1 of other tenants")
    expect(look.locator(".plot svg path.curve")).to_have_count(2)
    worker = look.locator(".worker")
    expect(worker).to_contain_text("NVIDIA H200")
    expect(worker).to_contain_text("1 of other tenants")
    expect(worker.locator(".program > .span")).to_have_count(24)
    expect(worker.locator(".strip > i")).to_have_count(6)
    expect(worker.get_by_label("Where the time went")).to_contain_text("computing 1 h 0 min, 80.0 %")
    expect(worker.get_by_label("Where the time went")).not_to_contain_text("compiling")
    expect(worker).not_to_contain_text("theirs")
    expect(look.locator(".machine")).not_to_contain_text("loom-1")
    expect(worker.get_by_role("button")).to_have_count(0)


def test_operations_when_an_operator_drains_a_worker_then_its_card_reports_it_until_it_takes_jobs_again(
    look: Page, busy: Busy
) -> None:
    """Operators see the machine and steer its workers; a tenant sees neither its name nor a button."""
    enter(look, busy.stage.admin, "#/operations")
    expect(look.locator(".tile").nth(3)).to_have_text("jobs of all tenants3 running1 waiting")
    machine = look.locator(".machine")
    expect(machine.locator("header").first).to_contain_text("loom-1")
    expect(machine.locator("header").first).to_contain_text("1 × NVIDIA H200 · 3 jobs")
    machine.get_by_role("button", name="Drain").click()
    expect(machine.locator(".badge")).to_have_text("drained")
    machine.get_by_role("button", name="Take jobs again").click()
    expect(machine.locator(".badge")).to_have_text("alive")


def test_usage_of_an_operator_lists_tenants_and_keys(look: Page, busy: Busy) -> None:
    """Tokens, limits, tenants and keys are there for the operator; a user sees only its own."""
    enter(look, busy.stage.admin, "#/usage")
    expect(look.locator(".tile").first).to_contain_text("733 k")
    expect(look.get_by_text("4 of 20")).to_be_visible()
    expect(look.get_by_role("row", name=re.compile("Rival"))).to_be_visible()
    expect(look.get_by_text(f"weft_{key_id(busy.stage.rival)}_…")).to_be_visible()
    keys = look.get_by_role("table", name="Keys").locator("tbody tr")
    expect(keys).to_have_count(3)
    look.get_by_label("Search tenants and keys").fill("rival")
    expect(keys).to_have_count(1)
    expect(look.get_by_role("table", name="Tenants").locator("tbody tr")).to_have_count(1)
    look.get_by_role("button", name="Sign out").click()
    enter(look, busy.stage.key, "#/usage")
    expect(look.locator(".tile").first).to_contain_text("733 k")
    expect(look.get_by_text("Rival")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screens_at_390_pixels_do_not_scroll_sideways(browser: Browser, busy: Busy, scheme: str) -> None:
    """Every screen fits a phone, also with long names and files' problems, in both schemes."""
    context = browser.new_context(
        base_url=busy.live.url,
        viewport={"width": 390, "height": 844},
        is_mobile=True,
        has_touch=True,
        color_scheme=scheme,
    )
    page = context.new_page()
    enter(page, busy.stage.admin)
    jobs = [f"jobs/{busy.ids[name]}" for name in ("summaries", "broken", "stopped", "resting")]
    compared = "/".join(busy.ids[name] for name in ("summaries", "broken", "stopped"))
    ours = ["jobs", *jobs, f"compare/{compared}", "new", f"new/{busy.ids['resting']}", "data"]
    for address in [*ours, "chat", "operations", "usage"]:
        page.goto(f"/#/{address}")
        expect(page.locator(".screen h1")).to_be_visible()
        if address == "new":
            attach(page, GOOD + b'{"prompt": ' + b"x" * 400 + b"\n")
            expect(page.locator(".problems li")).to_have_count(1)
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, address
    page.set_viewport_size({"width": 764, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 764
    context.close()


def test_keyboard_alone_reaches_a_job_and_skips_the_tabs(look: Page, busy: Busy) -> None:
    """The first tab stop skips to the content; the next ones lead to the first job."""
    enter(look, busy.stage.key)
    expect(look.locator("table.jobs tbody tr")).to_have_count(8)
    look.reload()
    expect(look.locator("table.jobs tbody tr")).to_have_count(8)
    look.keyboard.press("Tab")
    expect(look.get_by_text("Skip to the content")).to_be_focused()
    look.keyboard.press("Enter")
    expect(look.locator("main")).to_be_focused()
    for _ in range(12):
        look.keyboard.press("Tab")
        if look.evaluate("document.activeElement.closest('table') !== null"):
            break
    # The list is replaced with every answer; the job that has the focus keeps it.
    held = look.evaluate("document.activeElement.href")
    look.evaluate("document.activeElement.dataset.old = 1")
    expect(look.locator("[data-old]")).to_have_count(0)
    assert look.evaluate("document.activeElement.href") == held
    look.keyboard.press("Enter")
    expect(look.locator("h1")).to_contain_text("waiting")


def test_service_that_goes_away_is_reported_once_and_comes_back(look: Page, busy: Busy) -> None:
    """Without the service the page keeps what it shows and reports that it waits."""
    enter(look, busy.stage.key)
    rows = look.locator("table.jobs tbody tr")
    expect(rows).to_have_count(8)
    look.route("**/*", lambda route: route.fulfill(status=400, body="<html>proxy</html>"))
    expect(look.locator("#offline")).to_contain_text("cannot be reached")
    expect(rows).to_have_count(8)
    look.unroute("**/*")
    expect(look.locator("#offline")).to_be_hidden()
