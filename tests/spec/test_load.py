"""Jobs files: YAML, defaults, overrides, and errors that name the line."""

import itertools
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.spec import AdapterSpec, load_run, run_from_mapping
from weft.spec.load import apply_override, locate

JOBS = """\
base_model: tiny
defaults:
  learning_rate: 1e-3
  lora: {rank: 4, alpha: 4}
jobs:
  - name: a
    train_data: a.jsonl
  - name: b
    data: [b.jsonl, c.jsonl]
    lr: 2e-3
    adapter:
      lora_r: 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.yaml"
    file.write_text(JOBS)
    return file


def problem(path: Path, text: str, *overrides: str) -> str:
    """The sentence about a file, without the file's directory."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return str(caught.value).replace(str(path), "jobs.yaml")


def test_load_run_when_jobs_have_defaults_then_a_jobs_own_words_win(path: Path):
    first, second = load_run(path).jobs
    assert (first.learning_rate, first.adapter.r, first.adapter.lora_alpha) == (1e-3, 4, 4.0)
    # The default has `rank` and `learning_rate`, the job has `lora_r` and `lr`: one setting each.
    assert (second.learning_rate, second.adapter.r, second.adapter.lora_alpha) == (2e-3, 8, 4.0)
    assert second.train_data == ("b.jsonl", "c.jsonl")


def test_load_run_when_overridden_then_the_command_line_wins(path: Path):
    run = load_run(path, ["jobs.0.adapter.r=32", "jobs.b.lr=5e-4", "defaults.seed=7", "capacity=4096"])
    assert run.jobs[0].adapter.r == 32
    assert run.jobs[0].adapter.lora_alpha == 4.0
    assert run.jobs[1].learning_rate == 5e-4
    assert [job.seed for job in run.jobs] == [7, 7]
    assert run.capacity == 4096


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("lr: 2e-3", "learning_rate: -1", "jobs.yaml line 10: jobs.1.learning_rate: must be above 0, got -1.0."),
        (
            "lora_r: 8",
            "lora_rr: 8",
            "jobs.yaml line 12: jobs.1.adapter.lora_rr: unknown setting. Did you mean lora_r?",
        ),
        ("name: b", "name: A", "jobs.yaml line 8: jobs.1.name: 'A' is also the name of jobs.0; names must differ."),
        ("lora: {rank: 4", "adapter: {r: 0", "jobs.yaml line 4: defaults.adapter.r: must be at least 1, got 0."),
        (
            "lora: {rank: 4",
            "adapter: {rnak: 4",
            "jobs.yaml line 4: defaults.adapter.rnak: unknown setting. Did you mean rank?",
        ),
        # A second name of a setting stands on its own line, whatever the error calls the setting.
        ("lr: 2e-3", "lr: -1", "jobs.yaml line 10: jobs.1.learning_rate: must be above 0, got -1.0."),
        ("lora: {rank: 4", "lora: {rank: 0", "jobs.yaml line 4: defaults.adapter.r: must be at least 1, got 0."),
        ("lora_r: 8", "lora_r: x", "jobs.yaml line 12: jobs.1.adapter.r: expected a whole number, got 'x'."),
        (
            "lora_r: 8",
            "lora_r: 8\n      rank: 8",
            "jobs.yaml line 13: jobs.1.adapter.rank: lora_r and rank are two names of one setting; keep one.",
        ),
        ("base_model: tiny", "base_model: 2024-02-30", "jobs.yaml: has an impossible value: day is"),
        ("base_model: tiny", "base_model: \x07", "jobs.yaml: is not valid YAML: unacceptable character #x0007:"),
        ("  - name: a\n    train", "  - train", "jobs.yaml line 6: jobs.0: name is missing."),
        ("base_model: tiny\n", "", "jobs.yaml: base_model is missing."),
        ("lr: 2e-3", "lr: 2e-3\n    lr: 1", "jobs.yaml line 11: jobs.1.lr is set twice, here and on line 10."),
        ("base_model: tiny", "base_model: [tiny", "jobs.yaml line 2: is not valid YAML:"),
        ("base_model: tiny", "base_model: ''", "jobs.yaml line 1: base_model: is empty; write a name or a path."),
        (
            "name: b",
            "name: no",
            "jobs.yaml line 8: jobs.1.name: expected text, got False. In YAML, put texts such as no,",
        ),
        ("name: b", "name: 2024-01-01", "jobs.yaml line 8: jobs.1.name: expected text, got 2024-01-01. In YAML, put"),
        ("lora_r: 8", "method: DORA", "jobs.yaml line 12: jobs.1.adapter.method: got 'DORA'; accepted are lora, "),
    ],
)
def test_load_run_when_the_file_is_wrong_then_names_the_line(path: Path, old: str, new: str, sentence: str):
    assert JOBS.count(old) == 1
    found = problem(path, JOBS.replace(old, new))
    assert found.startswith(sentence)
    assert "\n" not in found


NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]\n" for inner, name in itertools.pairwise("abcdefghijkl")
)


@pytest.mark.parametrize("text", [NESTED, "a: &a [*a]\n", "a: &a {b: *a}\n"], ids=["nested", "in a list", "in itself"])
def test_load_run_when_aliases_stand_for_billions_of_values_then_refused(path: Path, text: str):
    assert problem(path, JOBS + text) == "jobs.yaml: its aliases stand for more than 100,000 values; write fewer."


def test_override_when_its_aliases_stand_for_billions_of_values_then_refused(path: Path):
    nested = "{" + NESTED.strip().replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match="its aliases stand for more than 100,000 values"):
        load_run(path, [f"defaults.data_columns={nested}"])


def test_load_run_when_jobs_share_settings_by_an_alias_then_each_has_them(path: Path):
    path.write_text("base_model: tiny\njobs:\n  - &a {name: a, data: x, lr: 1e-3}\n  - {<<: *a, name: b}\n")
    assert [(job.name, job.learning_rate) for job in load_run(path).jobs] == [("a", 1e-3), ("b", 1e-3)]


@pytest.mark.parametrize(
    ("default", "own"),
    [
        ("adam_epsilon: 1e-6", "optim: lion_32bit"),
        ("train_on_inputs: true", "objective: dpo"),
        ("beta: 0.2", "objective: supervised"),
        ("adapter: {lora_dropout: 0.1}", "adapter: {method: bitfit}"),
    ],
)
def test_load_run_when_a_default_is_for_other_kinds_of_jobs_then_a_job_leaves_it_out(
    path: Path, default: str, own: str
):
    jobs = f"jobs:\n  - {{name: a, data: x}}\n  - {{name: b, data: x, {own}}}\n"
    path.write_text(f"base_model: tiny\ndefaults: {{{default}}}\n{jobs}")
    setting = default.partition(":")[0]
    first, second = (getattr(job, setting) for job in load_run(path).jobs)
    assert first != second


def test_load_run_when_there_is_no_readable_file_then_reports_it(tmp_path: Path):
    def why(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_run(path)
        return str(caught.value)

    assert (
        why(tmp_path / "gone")
        == f"{tmp_path / 'gone'}: there is no such file. `weft init` writes a jobs file to start from."
    )
    assert why(tmp_path) == f"{tmp_path}: is a directory, not a jobs file."
    (tmp_path / "empty").write_text("# nothing\n")
    assert why(tmp_path / "empty").startswith(f"{tmp_path / 'empty'}: the file is empty.")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert why(tmp_path / "binary") == f"{tmp_path / 'binary'}: is not UTF-8 text."
    (tmp_path / "deep").write_text("[" * 5000)
    assert why(tmp_path / "deep") == f"{tmp_path / 'deep'}: is nested too deeply."


def test_load_run_when_the_file_is_a_link_to_nothing_then_reports_where_it_leads(tmp_path: Path):
    (tmp_path / "jobs.yaml").symlink_to("gone.yaml")
    with pytest.raises(ConfigError, match=r"jobs\.yaml: is a link to gone\.yaml, which does not exist"):
        load_run(tmp_path / "jobs.yaml")


def test_load_run_when_yaml_has_python_objects_then_refuses(path: Path):
    assert "is not valid YAML" in problem(path, "base_model: !!python/object/apply:os.system [ls]\n" + JOBS[17:])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("capacity", "'capacity' is not an override; write key=value"),
        ("jobs.c.lr=1", "jobs.c.lr=1: jobs.c: there is no item 'c'; there are 0 to 1 (a, b)."),
        ("jobs.5.lr=1", "jobs.5.lr=1: jobs.5: there is no item '5'"),
        ("capacity=[", "capacity=[: the value of capacity is not valid: '['."),
        ("capacity=2024-02-30", "capacity=2024-02-30: the value of capacity is not valid: '2024-02-30'."),
        ("jobs..lr=1", "'jobs..lr=1' is not an override; write key=value"),
        ("base_model.x=1", "base_model.x=1: base_model holds no settings."),
        # The override is the place, not the line of the file it replaces.
        ("jobs.0.lr=oops", "jobs.0.lr=oops: jobs.0.learning_rate: expected a number, got 'oops'."),
        ("jobs.b.learning_rate=-1", "jobs.b.learning_rate=-1: jobs.1.learning_rate: must be above 0, got -1.0."),
        ("jobs.b.lora={rank: 0}", "jobs.b.lora={rank: 0}: jobs.1.adapter.r: must be at least 1, got 0."),
        ("deflaults.lr=1", "deflaults.lr=1: deflaults: unknown setting. Did you mean defaults?"),
        # A location that the override names already is not repeated.
        ("jobs.0.lrr=1", "jobs.0.lrr=1: unknown setting."),
        ("defaults.save_minutes=-1", "defaults.save_minutes=-1: must be at least 0, got -1.0."),
    ],
)
def test_load_run_when_an_override_is_wrong_then_gives_the_reason(path: Path, override: str, sentence: str):
    assert problem(path, JOBS, override).startswith(sentence)


def test_load_run_when_max_length_is_above_a_given_capacity_then_reports_where_it_stands(path: Path):
    """A setting that a job lacks is in the defaults, or in the override that set them."""
    above = "jobs.0.max_length: max_length 4096 is above the run's capacity of 2048 tokens; lower max_length or raise"
    text = JOBS.replace("learning_rate: 1e-3", "cutoff_len: 4096")
    assert problem(path, text, "capacity=2048").startswith(f"jobs.yaml line 3: {above}")
    override = "defaults.max_length=4096"
    assert problem(path, JOBS, "capacity=2048", override).startswith(f"{override}: {above}")
    path.write_text(text)
    for given in ([], ["capacity=auto"]):
        run = load_run(path, given)
        assert run.capacity == "auto" and run.longest == 4096


def test_load_run_when_an_override_uses_another_name_of_a_setting_then_it_wins(path: Path):
    run = load_run(path, ["jobs.b.learning_rate=5e-4", "jobs.b.lora.r=16", "defaults.adapter.rank=2", "model=other"])
    assert (run.base_model, run.jobs[0].adapter.r) == ("other", 2)
    assert (run.jobs[1].learning_rate, run.jobs[1].adapter.r) == (5e-4, 16)


def test_locate_when_a_setting_is_requested_then_names_its_line_or_override(path: Path):
    assert locate("jobs.1.adapter.r", path) == f"{path} line 12: jobs.1.adapter.r"
    assert locate("jobs.0.adapter.r", path) == f"{path} line 4: jobs.0.adapter.r"
    assert locate("jobs.0.adapter.target_modules", path) == f"{path} line 6: jobs.0.adapter.target_modules"
    assert locate("capacity", path) == f"{path}: capacity"
    assert locate("jobs.1.adapter.r", path, ["jobs.b.lora.rank=64"]) == "jobs.b.lora.rank=64: jobs.1.adapter.r"


def test_apply_override_when_the_section_does_not_exist_then_makes_it():
    tree: dict[str, object] = {"defaults": None}
    apply_override(tree, "defaults.adapter.r=4")
    assert tree == {"defaults": {"adapter": {"r": 4}}}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ([], "expected settings such as base_model and jobs, got a list."),
        ({"base_model": "tiny"}, "jobs: expected a list of jobs, got nothing."),
        (
            {"base_model": "tiny", "space": {"r": [2]}},
            "jobs: expected a list of jobs, got nothing. This is a sweep file: `weft sweep` trains it, and with "
            "--dry-run plans it.",
        ),
        ({"base_model": "tiny", "jobs": []}, "jobs: there are no jobs; write at least one."),
        ({"base_model": "tiny", "jobs": ["a"]}, "jobs.0: expected a mapping with name and train_data, got 'a'."),
        ({"base_model": "tiny", "jobs": [], "defaults": 3}, "defaults: expected a mapping of job settings, got 3."),
        (
            {"base_model": "tiny", "jobs": [], "defaults": {"name": "x"}},
            "defaults.name: a name cannot be a default: each job has its own.",
        ),
    ],
)
def test_run_from_mapping_when_the_shape_is_wrong_then_reports_what_is_expected(tree: object, sentence: str):
    with pytest.raises(ConfigError) as caught:
        run_from_mapping(tree)
    assert str(caught.value) == sentence


def test_run_from_mapping_when_a_job_names_another_method_then_defaults_that_it_lacks_are_left_out():
    defaults = {"adapter": {"rank": 8, "lora_dropout": 0.1}, "loraplus_lr_ratio": 4.0, "max_steps": 5}
    jobs = [
        {"name": "a", "train_data": "a.jsonl"},
        {"name": "b", "train_data": "a.jsonl", "adapter": {"method": "ia3"}},
        {"name": "c", "train_data": "a.jsonl", "adapter": {"method": "vera"}},
    ]
    lora, ia3, vera = run_from_mapping({"base_model": "tiny", "defaults": defaults, "jobs": jobs}).jobs
    assert (lora.adapter.r, lora.loraplus_lr_ratio) == (8, 4.0)
    assert ia3.adapter == AdapterSpec(method="ia3") and ia3.loraplus_lr_ratio is None and ia3.max_steps == 5
    assert vera.adapter == AdapterSpec(method="vera", lora_dropout=0.1)
    jobs[1]["adapter"] = {"method": "ia3", "r": 4}
    with pytest.raises(ConfigError, match="r: is a setting of lora and dora; the method is ia3"):
        run_from_mapping({"base_model": "tiny", "defaults": defaults, "jobs": jobs})
