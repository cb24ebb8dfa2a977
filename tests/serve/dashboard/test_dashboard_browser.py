"""The dashboard in a real browser, on the real app."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_stage import House, Stage
from dashboard_tab import GOOD, attach, enter
from playwright.sync_api import Page, Route, expect

from weft.serve.db.tenants import create_key, key_id, revoke_key

BAD = GOOD + b'{"prompt": oops}\n' + b"[1]\n"


@pytest.fixture
def stage(house: House) -> Stage:
    """A tenant of the test's own."""
    return house.stage.guest()


def test_sign_in_when_the_key_is_wrong_reports_it_and_keeps_nothing(page: Page, stage: Stage) -> None:
    """A wrong key is one sentence; a right one opens the page and lives in this session only."""
    page.goto("/")
    page.get_by_label("API key").fill("weft_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not accepted")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
    page.get_by_label("API key").fill(stage.key)
    page.keyboard.press("Enter")
    expect(page.get_by_text("There are no jobs yet")).to_be_visible()
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    expect(page.get_by_text("There are no jobs yet")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_curve_when_smoothed_then_keeps_its_slope_and_its_ends(page: Page) -> None:
    """A straight line stays what it is up to both ends; noise around it is evened out."""
    page.goto("/")
    smoothed = """async (values) => {
        const { smooth } = await import("/dashboard/static/charts.js");
        return smooth(values.map((y, x) => [x, y])).map(([, y]) => y);
    }"""
    straight = [100.0 - step for step in range(60)]
    assert page.evaluate(smoothed, straight) == pytest.approx(straight)
    noisy = [value + (-1) ** step for step, value in enumerate(straight)]
    found = page.evaluate(smoothed, noisy)
    assert max(abs(one - other) for one, other in zip(found[5:-5], straight[5:-5], strict=True)) < 0.3
    assert (found[0], found[-1]) == (noisy[0], noisy[-1])
    assert page.evaluate(smoothed, []) == []


def test_key_when_revoked_while_looking_requests_another(page: Page, stage: Stage) -> None:
    """A user who is shut out sees the sign-in again, not a broken page."""
    enter(page, stage.key)
    with stage.database.begin() as tx:
        revoke_key(tx, stage.tenant, key_id(stage.key))
    expect(page.get_by_role("alert")).to_contain_text("not accepted any more")


def test_jobs_when_searched_are_found_among_those_not_listed_yet(page: Page, stage: Stage) -> None:
    """Every word must be in a job's name, id, model or metadata; older pages are searched as well."""
    stage.job("needle", metadata={"team": "Blue"})
    for i in range(21):
        stage.job(f"hay-{i}")
    enter(page, stage.key)
    rows = page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(20)
    page.get_by_label("Search jobs").fill("blue need")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("needle")
    page.get_by_label("Search jobs").fill("needle red")
    expect(page.locator(".notice")).to_have_text('No job matches "needle red".')


def test_files_and_models_are_listed_with_sizes_and_deleted(page: Page, stage: Stage) -> None:
    """The lists can be searched; what is deleted is gone; a key without a scope sees the other list."""
    job = stage.job("keep")
    stage.start(job, 1)
    model = stage.succeed(job, "keep")
    stage.job("drop")
    enter(page, stage.key, "#/data")
    files = page.get_by_role("table", name="Files, newest first").locator("tbody tr")
    models = page.get_by_role("table", name="Models, newest first").locator("tbody tr")
    expect(files).to_have_count(2)
    expect(files.first).to_contain_text("drop.jsonl")
    expect(files.first).to_contain_text("3.13 KiB")
    expect(models).to_contain_text(f"{model}tiny22 B")
    expect(page.locator(".tile")).to_have_text(["files6.25 KiB2 files", "models22 B1 models"])
    page.get_by_label("Search files and models").fill("dro")
    expect(files).to_have_count(1)
    expect(page.locator(".notice")).to_have_text('None of them matches "dro".')
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete drop.jsonl").click()
    expect(page.locator(".notice")).to_have_count(2)
    page.get_by_label("Search files and models").fill("")
    expect(files).to_have_count(1)
    page.get_by_role("button", name=f"Delete {model}").click()
    expect(page.locator(".notice")).to_have_text("No job has made a model yet.")
    with stage.database.begin() as tx:
        key = create_key(tx, stage.tenant, scopes=["files"])
    page.get_by_role("button", name="Sign out").click()
    enter(page, key, "#/data")
    expect(files).to_have_count(1)
    expect(page.get_by_role("alert")).to_contain_text("models")


def test_job_when_it_trains_has_a_curve_that_grows(page: Page, stage: Stage) -> None:
    """New steps appear by themselves, and the job's end as well."""
    job = stage.job("growing")
    stage.start(job, 60)
    stage.train(job, 1, 10, 60)
    enter(page, stage.key, f"#/jobs/{job}")
    plot = page.locator(".plot[data-points]")
    expect(plot).to_have_attribute("data-points", "10")
    before = plot.locator("path.curve").first.get_attribute("d")
    expect(page.locator("dl.about")).to_contain_text("token accuracy16.7 %tokens")
    stage.train(job, 11, 30, 60)
    expect(plot).to_have_attribute("data-points", "30")
    assert plot.locator("path.curve").first.get_attribute("d") != before
    expect(page.get_by_text("30 of 60")).to_be_visible()
    expect(page.locator("dl.about")).to_contain_text("token accuracy50.0 %, validation 16.7 %")
    accuracies = page.get_by_label("Token accuracy: training 50.0 % at step 30, validation 16.7 % at step 20")
    expect(accuracies.locator("path.curve")).to_have_count(2)
    stage.train(job, 31, 60, 60)
    stage.succeed(job, "growing")
    expect(page.locator("h1 .badge")).to_have_text("succeeded")
    expect(plot).to_have_attribute("data-points", "60")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download adapter").click()
    assert saved.value.suggested_filename == "growing.zip"
    assert Path(saved.value.path()).read_bytes().startswith(b"PK")


def test_axes_of_few_steps_have_round_labels_where_their_values_are(page: Page, stage: Stage) -> None:
    """Steps have no fractions to round away, and learning rates close together keep the digits that differ."""
    job = stage.job("short")
    stage.start(job, 160)
    stage.train(job, 1, 13, 160)
    enter(page, stage.key, f"#/jobs/{job}")
    expect(page.locator(".plot svg")).to_have_count(4)
    axes = page.locator(".plot svg").evaluate_all(
        """plots => plots.map(svg => ["x", "y"].map(axis => [...svg.querySelectorAll("text")]
            .filter(text => (text.getAttribute("text-anchor") === "end") === (axis === "y"))
            .map(text => [parseFloat(text.textContent), Number(text.getAttribute(axis)), text.textContent])))"""
    )
    assert [text for _, _, text in axes[3][1]] == ["1.85e-4", "1.90e-4", "1.95e-4"]
    for labels in itertools.chain.from_iterable(axes):
        (first, start, _), (last, end, _) = labels[0], labels[-1]
        assert first != last
        for value, at, _ in labels:
            assert at == pytest.approx(start + (end - start) * (value - first) / (last - first), abs=0.5)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("wholeTicks(1, 2, 4)", [1, 2]),
        ("wholeTicks(1, 13, 4)", [5, 10]),
        ("wholeTicks(1, 100, 4)", [25, 50, 75, 100]),
        ("shareTicks(0.95, 1.07, 4)", [0.96, 0.98, 1]),
        ("binaryTicks(0, 1.3 * 2 ** 30, 4)", [0, 2**29, 2**30]),
        ("logTicks(Math.log10(0.03), Math.log10(4), 4)", [0.05, 0.1, 0.2, 0.5, 1, 2]),
        ("logTicks(-6.5, 0.5, 4)", [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1]),
        ("logTicks(Math.log10(2.1), Math.log10(2.6), 4)", [2.2, 2.4, 2.6]),
        ("labels(ticks(1.88e-4, 1.912e-4, 4), number)", ["1.88e-4", "1.89e-4", "1.90e-4", "1.91e-4"]),
        ("labels(wholeTicks(10_000, 10_100, 4), count)", ["10 k", "10.025 k", "10.05 k", "10.075 k", "10.1 k"]),
        ("labels([0.9, 0.925, 0.95], share)", ["90 %", "92.5 %", "95 %"]),
    ],
)
def test_ticks_of_an_axis_are_round_and_written_in_full(page: Page, axis: str, expected: list[Any]) -> None:
    """Whatever the scale, no two labels are the same and none is rounded."""
    page.goto("/")
    script = f"""async () => {{
        const charts = await import("/dashboard/static/charts.js");
        const {{ binaryTicks, labels, logTicks, shareTicks, ticks, wholeTicks }} = charts;
        const {{ count, number, share }} = await import("/dashboard/static/format.js");
        return {axis};
    }}"""
    assert page.evaluate(script) == expected


def test_job_with_many_events_loads_them_all_once(page: Page, stage: Stage) -> None:
    """More steps than a page holds make one whole curve."""
    job = stage.job("long")
    stage.start(job, 500)
    stage.train(job, 1, 430, 500)
    enter(page, stage.key, f"#/jobs/{job}")
    expect(page.locator(".plot[data-points]")).to_have_attribute("data-points", "430")
    stage.train(job, 431, 440, 500)
    expect(page.locator(".plot[data-points]")).to_have_attribute("data-points", "440")


def test_job_when_paused_and_cancelled_by_hand_shows_what_was_requested(page: Page, stage: Stage) -> None:
    """Buttons follow the state: what waits for the worker is shown, what cannot be done is not offered."""
    waiting = stage.job("waiting")
    held = stage.job("held")
    stage.start(held, 10)
    enter(page, stage.key, f"#/jobs/{waiting}")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("h1 .badge")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("h1 .badge")).to_have_text("queued")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("h1 .badge")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    page.goto(f"/#/jobs/{held}")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("h1 .badge")).to_have_text("pausing")


def test_job_of_another_tenant_is_one_sentence(page: Page, stage: Stage) -> None:
    """A foreign id is not found; there is no JSON on the page."""
    theirs = stage.job("theirs", tenant=stage.other)
    enter(page, stage.key, f"#/jobs/{theirs}")
    expect(page.get_by_role("alert")).to_contain_text("Could not find")
    assert "{" not in page.locator("main").inner_text()


def test_compose_with_a_bad_file_names_the_lines(page: Page, stage: Stage) -> None:
    """What the service finds in a file is shown by line, with the line itself; a corrected file starts a job."""
    enter(page, stage.key, "#/new")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("alert")).to_have_text("Choose a training file first.")
    attach(page, b"x", "notes.txt")
    expect(page.get_by_role("alert")).to_contain_text("notes.txt is not a .jsonl file")
    attach(page, BAD)
    problems = page.locator(".problems li")
    expect(problems).to_have_count(2)
    expect(problems.first).to_contain_text("line 5")
    expect(problems.first.locator("code")).to_have_text('{"prompt": oops}')
    expect(problems.last).to_contain_text("line 6")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_contain_text("train.jsonl is uploaded")
    page.get_by_label("Name").fill("first-try")
    page.get_by_label("Epochs").fill("2")
    page.get_by_label("Rank").fill("8")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("h1")).to_contain_text("first-try")
    settings = page.locator("dl.settings")
    expect(settings.locator("div", has_text="num_train_epochs")).to_contain_text("2")
    expect(settings.get_by_text("adapter.r", exact=True).locator("xpath=following-sibling::dd")).to_have_text("8")


def test_compose_with_chats_of_a_wrong_role_shows_the_refusal_at_the_file(page: Page, stage: Stage) -> None:
    """What only the start of a job finds, wrong roles for one, is shown at the file as well."""
    enter(page, stage.key, "#/new")
    wrong = {"messages": [{"role": "teacher", "content": "x"}]}
    right = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    attach(page, f"{json.dumps(right)}\n{json.dumps(wrong)}\n".encode())
    expect(page.locator(".ok")).to_be_visible()
    page.get_by_role("button", name="Start training").click()
    expect(page.locator(".problems li")).to_contain_text("line 2")
    expect(page.locator(".problems li")).to_contain_text("teacher")


def test_compose_when_started_before_the_models_are_listed_waits_for_them(page: Page, stage: Stage) -> None:
    """A user who is quicker than the service's list starts from the model shown first, not from none."""
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    enter(page, stage.key, "#/new")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("button", name="Checking the examples")).to_be_disabled()
    held[0].continue_()
    expect(page.locator("h1 .badge")).to_have_text("queued")


def test_compose_when_started_while_a_file_is_sent_waits_for_it(page: Page, stage: Stage) -> None:
    """The training file is not requested again, and no job begins without the examples to evaluate it with."""
    held: list[Route] = []
    enter(page, stage.key, "#/new")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    page.route("**/v1/files", lambda route: held.append(route))
    attach(page, GOOD, kind="validation")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("button", name="Checking the examples")).to_be_disabled()
    with page.expect_request("**/v1/fine_tuning/jobs") as requested:
        held[0].continue_()
    assert requested.value.post_data_json["validation_file"].startswith("file-")
    expect(page.locator("h1 .badge")).to_have_text("queued")


def test_compose_when_a_file_was_refused_then_it_is_not_left_out(page: Page, stage: Stage) -> None:
    """A job does not begin without a file that its owner chose; what is wrong with it stays on the screen."""
    enter(page, stage.key, "#/new")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    attach(page, b"no json", kind="validation")
    expect(page.locator(".problems li")).to_have_count(1)
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("alert").filter(has_text="was not taken")).to_be_visible()
    expect(page.locator(".problems li")).to_have_count(1)
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()


def test_compose_when_the_models_could_not_be_listed_requests_them_again(page: Page, stage: Stage) -> None:
    """A list that failed once is reported above the button and does not keep a job from starting."""
    page.route(
        "**/v1/models",
        lambda route: route.fulfill(status=503, json={"error": {"message": "Away for a moment."}}),
        times=1,
    )
    enter(page, stage.key, "#/new")
    expect(page.get_by_role("alert")).to_contain_text("Away for a moment.")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("h1 .badge")).to_have_text("queued")


def test_compose_with_a_wrong_setting_marks_its_field(page: Page, stage: Stage) -> None:
    """A refused setting is reported under the field it was typed in, in one sentence."""
    enter(page, stage.key, "#/new")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    page.get_by_label("Rank").fill("-3")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("#r")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#r")).to_be_focused()
    page.get_by_label("Rank").fill("16")
    page.get_by_label("Epochs").fill("999")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("#n_epochs")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".field .wrong")).to_have_count(1)


def test_compose_from_a_model_of_ones_own_goes_on_with_its_adapter(page: Page, stage: Stage) -> None:
    """A fine-tuned model is offered as a start; its adapter's shape is not requested again."""
    job = stage.job("first")
    stage.start(job, 1)
    model = stage.succeed(job, "first")
    enter(page, stage.key, "#/new")
    attach(page, GOOD)
    expect(page.locator(".ok")).to_be_visible()
    expect(page.get_by_label("Rank")).to_be_visible()
    page.get_by_label("Start from").select_option(model)
    expect(page.get_by_label("Rank")).to_be_hidden()
    page.get_by_label("Name").fill("second")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("h1")).to_contain_text("second")
    expect(page.locator("dl.settings")).to_contain_text(model)


def test_job_when_cloned_fills_the_form_and_makes_the_same_job(page: Page, stage: Stage) -> None:
    """The form shows every setting of the job, those without a field as JSON; sent unchanged, it is the same job."""
    trained = stage.job("start")
    stage.start(trained, 1)
    model = stage.succeed(trained, "start")
    enter(page, stage.key)
    api = {"base_url": page.url.split("/#")[0], "headers": {"authorization": f"Bearer {stage.key}"}, "timeout": 60}
    with httpx.Client(**api) as client:
        pairs = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2
        file, pair_file = (
            client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": (name, rows)}).json()["id"]
            for name, rows in (("again.jsonl", GOOD), ("pairs.jsonl", pairs))
        )
        lora = {"r": 4, "alpha": 6, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}
        settings = {"lr_scheduler_type": "cosine", "learning_rate": 1.7e-4, "weight_decay": 0.01}
        first = {"validation_file": file, "lora": lora, "settings": settings, "suffix": "one"}
        first |= {"max_steps": 7, "seed": 3, "metadata": {"team": "</textarea><b>blue"}}
        hyper = {"n_epochs": 4, "learning_rate_multiplier": 0.3, "beta": 0.7}
        second = {"training_file": pair_file, "method": {"type": "dpo", "dpo": {"hyperparameters": hyper}}}
        for body in (first, second, {"model": model}, {"lora": {"method": "ia3"}}):
            made = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file, **body}).json()
            page.goto(f"/#/jobs/{made['id']}")
            page.get_by_role("link", name="Clone").click()
            expect(page.locator(".ok").first).to_have_text("Uploaded before and ready.")
            if body is first:
                expect(page.get_by_label("Alpha")).to_have_value("6")
                expect(page.get_by_label("Most steps")).to_have_value("7")
            page.get_by_role("button", name="Start training").click()
            expect(page.locator("h1 .badge")).to_have_text("queued")
            id = page.url.split("/")[-1]
            assert id != made["id"]
            again = client.get(f"/v1/fine_tuning/jobs/{id}").json()
            own = {"id", "created_at"}
            assert {k: v for k, v in again.items() if k not in own} == {k: v for k, v in made.items() if k not in own}
        client.delete(f"/v1/files/{file}")
    page.goto(f"/#/new/{made['id']}")
    expect(page.get_by_role("alert")).to_have_text("The file of that job has been deleted; choose another.")
    page.get_by_label("Metadata").fill("team: blue")
    attach(page, GOOD)
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("#metadata")).to_have_attribute("aria-invalid", "true")


def test_chat_without_a_worker_reports_it(page: Page, stage: Stage) -> None:
    """Without a worker one sentence takes the answer's address."""
    job = stage.job("lonely")
    stage.start(job, 1)
    stage.succeed(job, "lonely")
    enter(page, stage.key, "#/chat")
    page.get_by_label("Message", exact=True).fill("Hello?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer.wrong")).to_have_count(2)
    expect(page.locator(".answer.wrong").first).to_contain_text("No worker has the model 'tiny' loaded")


def test_text_of_users_when_it_looks_like_html_stays_text(page: Page, stage: Stage) -> None:
    """What a user wrote is never markup."""
    job = stage.job(
        "<b>evil</b><img src=x onerror=alert(1)>",
        metadata={"<img src=x onerror=alert(1)>": "<script>alert(1)</script>"},
    )
    with stage.database.begin() as tx:
        from weft.serve.db.jobs import add_event

        add_event(tx, stage.tenant, job, "warn", "<b>bold</b><img src=x onerror=alert(1)>")
    page.on("dialog", lambda dialog: pytest.fail("a script of a user's ran"))
    enter(page, stage.key, f"#/jobs/{job}")
    expect(page.locator(".events .warn")).to_contain_text("<b>bold</b>")
    shown = page.locator("h2", has_text="Metadata").locator("xpath=following-sibling::section")
    expect(shown.locator("dd")).to_have_text("<script>alert(1)</script>")
    expect(page.locator("dl.settings").first).not_to_contain_text("alert")
    for address in (f"jobs/{job}", "jobs", f"compare/{job}/{stage.job('plain')}", "data", f"new/{job}"):
        page.goto(f"/#/{address}")
        expect(page.locator("main")).to_contain_text("<b>evil</b>")
        expect(page.locator("main img, main script, main b:text('evil')")).to_have_count(0)
