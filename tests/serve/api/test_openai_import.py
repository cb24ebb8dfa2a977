"""Jobs of OpenAI's come here: from the JSON of unmodified SDK objects to a jobs file, or to a service."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest
from service_home import Home, chat_lines, make_home

from weft.cli.main import main
from weft.spec import load_run

CLIENT = openai.OpenAI
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "from-openai.md").read_text(encoding="utf-8")
PAIRS = b"".join(
    json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": f"name {i}"}]},
            "preferred_output": [{"role": "assistant", "content": "yes"}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }
    ).encode()
    + b"\n"
    for i in range(10)
)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Types a command in a folder of its own; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["weft", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    return run


def point_sdk_at(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client, with any address, talks to this service."""
    own = {"base_url": "http://testserver/v1", "api_key": home.keys["acme"], "max_retries": 0}
    monkeypatch.setattr(openai, "OpenAI", lambda **_: CLIENT(http_client=home.http, **own))


def filled(home: Home) -> dict[str, str]:
    """Three jobs of the kinds that there are, one of them ended; their ids."""
    files = home.upload(data=chat_lines(20)), home.upload(data=PAIRS), home.upload(data=chat_lines(3))
    hyperparameters = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    dpo = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3}}}
    made = {
        "greeter": home.job(file=files[0], validation_file=files[2], suffix="greeter", seed=7, method=method,
                            metadata={"team": "a"}),
        "pairs": home.job(file=files[1], method=dpo),
        "plain": home.job(file=files[0]),
    }  # fmt: skip
    home.finish(made["greeter"])
    return made


def exported(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    """Runs the page's own script."""
    point_sdk_at(home, monkeypatch)
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], "from-openai.md", "exec"), {})


def test_import_when_an_export_of_the_sdk_is_read_then_the_jobs_file_has_every_setting(home, typed, monkeypatch):
    ids = filled(home)
    exported(monkeypatch, home)
    assert typed("import", "openai", "export", "--base-model", "tiny") == 0
    run = load_run(Path("from-openai/jobs.yaml"))
    jobs = {job.name: job for job in run.jobs}
    assert run.base_model == "tiny" and set(jobs) == {"greeter", ids["pairs"], ids["plain"]}
    first = jobs["greeter"]
    assert (first.num_train_epochs, first.batch_size, first.learning_rate, first.seed) == (2, 2, 1e-4, 7)
    assert first.eval_data is not None and Path("from-openai", str(first.train_data[0])).read_bytes() == chat_lines(20)
    pairs = jobs[ids["pairs"]]
    assert (pairs.objective, pairs.beta, pairs.batch_size) == ("dpo", 0.3, 1)
    assert '# metadata: {"team": "a"}' in Path("from-openai/jobs.yaml").read_text()


def test_import_when_sent_to_a_service_twice_then_each_job_is_there_once(home, typed, monkeypatch, tmp_path, capsys):
    ids = filled(home)
    exported(monkeypatch, home)
    other = make_home(tmp_path / "other")
    monkeypatch.setenv("WEFT_API_KEY", "key")
    with other.http:
        point_sdk_at(other, monkeypatch)
        for _ in range(2):
            assert typed("import", "openai", "export", "--base-model", "tiny", "--to", "http://testserver/v1") == 0
        client = other.sdk()
        made = list(client.fine_tuning.jobs.list())
        assert {job.metadata["openai_job"] for job in made} == set(ids.values())
        assert len(made) == 3 and len(list(client.files.list())) == 3
        found = client.fine_tuning.jobs.list(metadata={"openai_job": ids["greeter"]}).data[0]
        assert (found.seed, found.metadata["team"], found.method.type) == (7, "a", "supervised")
        assert client.files.content(found.training_file).read() == chat_lines(20)
    other.database.close()
    assert f"{ids['pairs']} is ftjob-" in capsys.readouterr().out


def test_import_when_the_service_refuses_a_job_then_reports_it_and_leaves_no_file(
    home, typed, monkeypatch, tmp_path, capsys
):
    filled(home)
    exported(monkeypatch, home)
    other = make_home(tmp_path / "other")
    with other.http:
        point_sdk_at(other, monkeypatch)
        words = ("import", "openai", "export", "--base-model", "nowhere", "--key", "k", "--to", "http://testserver/v1")
        assert typed(*words) == 2
        assert not list(other.sdk().files.list())
    other.database.close()
    error = capsys.readouterr().err
    assert "error: http://testserver/v1: the service answers:" in error and "nowhere" in error


def test_page_when_its_commands_are_typed_in_order_then_each_works(home, typed, monkeypatch, tmp_path, capsys):
    filled(home)
    exported(monkeypatch, home)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("weft ")]
    assert len(lines) == 5
    other = make_home(tmp_path / "other")
    with other.http:
        point_sdk_at(other, monkeypatch)
        monkeypatch.setenv("WEFT_API_KEY", "key")
        for line in lines:
            words = shlex.split(line)[1:]
            fewer = ["defaults.max_steps=1"] if words[0] == "train" else []
            assert typed(*words, *fewer) == 0, f"{line}: {capsys.readouterr()}"
    other.database.close()


def write_export(*changes: dict[str, Any]) -> None:
    """One job after another, each with something changed."""
    whole = {
        "object": "fine_tuning.job", "id": "ftjob-1", "model": "gpt-x", "status": "succeeded", "seed": 1,
        "training_file": "file-1", "validation_file": None, "hyperparameters": {"n_epochs": "auto"}, "metadata": None,
    }  # fmt: skip
    folder = Path("export")
    folder.mkdir()
    (folder / "file-1").write_bytes(chat_lines(2))
    (folder / "file-pairs").write_bytes(PAIRS)
    picture = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    turns = [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "a cat"}]
    (folder / "file-picture.jsonl").write_text(json.dumps({"messages": turns}))
    jobs = [{**whole, "id": f"ftjob-{index}", **change} for index, change in enumerate(changes)]
    (folder / "jobs.json").write_text(json.dumps({"object": "list", "data": jobs, "has_more": False}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reinforcement": ({"method": {"type": "reinforcement"}}, "its method is 'reinforcement'; supervised and dpo are"),
    "images": (
        {"training_file": "file-picture"},
        "file-picture.jsonl line 1: messages[0].content[0].type is 'image_url'",
    ),
    "no file": ({"training_file": "file-9"}, "training_file is file-9, and there is no export/file-9.jsonl."),
    "a path": ({"training_file": "../file-1"}, "training_file is '../file-1', not the id of a file."),
    "tuned": ({"model": "ft:gpt-x:acme::1"}, "it goes on from ft:gpt-x:acme::1, whose weights OpenAI does not hand"),
    "failed": ({"status": "failed"}, "its status is failed; jobs that failed or were cancelled are left out."),
    "pairs": ({"training_file": "file-pairs"}, "file-pairs line 1: is preference data, but the method is supervised."),
    "unknown number": ({"hyperparameters": {"n_epochs": "many"}}, "n_epochs is 'many', neither a number nor 'auto'."),
    "unknown setting": ({"hyperparameters": {"momentum": 1}}, "its hyper-parameter momentum is not supported."),
    "wrong number": ({"hyperparameters": {"n_epochs": 0}}, "num_train_epochs: must be above 0, got 0.0."),
    "wrong seed": ({"seed": -4}, "seed: must be at least 0 and below 4294967296, got -4."),
}


def test_import_when_some_jobs_cannot_be_carried_over_then_each_is_named_and_the_others_are_written(typed, capsys):
    write_export(*(change for change, _ in REFUSED.values()), {})
    assert typed("import", "openai", "export", "--base-model", "tiny") == 1
    lines = capsys.readouterr().err.splitlines()
    for index, (line, (_, sentence)) in enumerate(zip(lines, REFUSED.values(), strict=True)):
        assert line.startswith(f"left out ftjob-{index}: {sentence}"), line
    assert [job.name for job in load_run(Path("from-openai/jobs.yaml")).jobs] == [f"ftjob-{len(REFUSED)}"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["export"],
            "ftjob-0: no base model is given for gpt-x; use --base-model NAME, or --model gpt-x=NAME.",
        ),
        (["export", "--model", "gpt-x"], "--model: got 'gpt-x'; write THERE=HERE, such as gpt-4o-mini=tiny."),
        (["nowhere"], "nowhere: cannot be read (No such file or directory)."),
        (["export/file-1"], "export/file-1: is not valid JSON"),
        (["empty"], "empty: has no .json file with jobs; save what GET /v1/fine_tuning/jobs answers there."),
        (["other.json"], "other.json: item 1 is 'file'; expected objects 'fine_tuning.job', one or a list of them."),
        (
            ["export", "--base-model", "tiny", "--to", "http://x/v1"],
            "--key: --to needs a key of the service; give it in",
        ),
        (
            ["export", "--base-model", "tiny", "--out", "empty"],
            "empty: already exists; choose another folder with --out.",
        ),
    ],
)
def test_import_when_an_option_is_wrong_then_gives_the_reason_and_writes_nothing(
    words, sentence, typed, capsys, monkeypatch
):
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    write_export({})
    Path("empty").mkdir()
    Path("other.json").write_text('{"object": "file", "id": "file-1"}')
    assert typed("import", "openai", *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not Path("from-openai").exists() and not list(Path("empty").iterdir())


def test_import_when_models_map_to_two_backbones_then_there_is_a_jobs_file_for_each(typed, capsys):
    write_export({"user_provided_suffix": "my bot!"}, {"model": "gpt-y", "suffix": "my-bot"}, {"suffix": "my-bot"})
    words = ("--base-model", "tiny", "--model", "gpt-y=org/other", "--model", "gpt-z=tiny")
    assert typed("import", "openai", "export", *words) == 0
    assert "note --model: no job there is on gpt-z; they are on gpt-x, gpt-y." in capsys.readouterr().err
    runs = [load_run(Path(f"from-openai/jobs-{number}.yaml")) for number in (1, 2)]
    assert [run.base_model for run in runs] == ["tiny", "org/other"]
    assert [[job.name for job in run.jobs] for run in runs] == [["my-bot", "my-bot-2"], ["my-bot-1"]]
