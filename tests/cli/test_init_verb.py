"""`weft init`."""

import re
from pathlib import Path

import pytest

from weft.cli.files import JOBS_FILE
from weft.engine.train import prepare_run
from weft.spec import load_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_when_run_then_writes_a_file_that_can_be_trained_at_once(weft, folder: Path):
    result = weft("init")
    assert result.code == 0
    assert result.out.splitlines() == [
        "wrote jobs.yaml, and example data for it: data/shout.jsonl and data/reverse.jsonl",
        "next: weft train jobs.yaml",
    ]
    run = prepare_run(load_run("jobs.yaml"), base_dir=folder)
    assert list(run.engine.jobs) == ["shout", "reverse"]
    assert not run.failed
    assert run.data["shout"].eval is not None
    assert "weft train jobs.yaml --dry-run" in (folder / "jobs.yaml").read_text()


def test_init_when_the_examples_in_comments_are_switched_on_then_they_are_valid(folder: Path):
    text, count = re.subn(r"^( *)#: ", r"\1", JOBS_FILE.format(file="jobs.yaml"), flags=re.MULTILINE)
    assert count == 5
    (folder / "jobs.yaml").write_text(text)
    run = load_run("jobs.yaml")
    assert run.jobs[1].seed == 7
    assert run.jobs[0].adapter.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert run.report_to == ("tensorboard",)


def test_init_when_a_file_is_in_the_way_then_touches_nothing_until_forced(weft, refused, folder: Path):
    (folder / "data").mkdir()
    (folder / "data" / "shout.jsonl").write_text("mine")
    assert refused("init") == "data/shout.jsonl: already exists. Use --force to replace it."
    assert not (folder / "jobs.yaml").exists()
    assert (folder / "data" / "shout.jsonl").read_text() == "mine"
    assert weft("init", "--force").code == 0
    assert (folder / "data" / "shout.jsonl").read_text() != "mine"


def test_init_when_given_a_path_then_the_data_goes_beside_the_file(weft, folder: Path):
    result = weft("init", "new place/my.yaml")
    assert result.out.splitlines()[-1] == "next: weft train 'new place/my.yaml'"
    assert (folder / "new place" / "data" / "reverse.jsonl").is_file()
    load_run(folder / "new place" / "my.yaml")


def test_init_when_it_cannot_write_then_reports_where(refused, folder: Path):
    (folder / "taken").write_text("a file")
    assert refused("init", "taken/jobs.yaml").startswith("taken/data: a file is in the way")


def test_init_when_given_a_directory_then_refused_also_when_forced(refused, folder: Path):
    (folder / "here").mkdir()
    for name in (".", "here"):
        for force in ((), ("--force",)):
            expected = f"{name}: is a directory; name a file. {Path(name) / 'jobs.yaml'} would do."
            assert refused("init", name, *force) == expected
    assert list(folder.rglob("*")) == [folder / "here"]
