"""`weft generate`."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_adapters import SHOUTING


def test_generate_when_given_several_adapters_then_each_answers_every_prompt(weft, adapters: Path):
    result = weft(
        "generate", "--adapter", adapters / "strong", "--adapter", f"calm={adapters / 'idle' / 'adapter'}",
        "--adapter", "base", "--prompt", "planet", "--prompt", "garden", "--max-new-tokens", 12, "--json",
    )  # fmt: skip
    assert result.code == 0
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["adapter"] for line in lines] == ["strong", "calm", "base"] * 2
    assert [line["where"] for line in lines[::3]] == ["--prompt 1", "--prompt 2"]
    assert lines[0]["prompt"] == "<|user|>planet<|end|><|assistant|>"
    answers = {(line["adapter"], line["where"]): line["answer"] for line in lines}
    assert answers["base", "--prompt 1"] == answers["calm", "--prompt 1"] == "planet"
    assert answers["strong", "--prompt 1"] != "planet"


def test_generate_when_the_data_is_not_there_then_reports_it_before_the_model_is_loaded(refused):
    assert refused("generate", "--base-model", "./none", "--data", "gone.jsonl") == "gone.jsonl: there is no such file."


def test_generate_when_without_json_then_shows_prompts_with_answers_under_them(weft, adapters: Path, echoes: Path):
    result = weft("generate", "--adapter", adapters / "idle", "--data", echoes)
    assert result.code == 0
    assert [line.split() for line in result.out.splitlines()] == [
        ["planet"], ["idle", "planet"], ["reference", "planet"], [],
        ["garden"], ["idle", "garden"], ["reference", "garden"], [],
    ]  # fmt: skip


def test_generate_when_given_a_file_then_writes_it_whole_and_reports_it(weft, tmp_path: Path, rows: Path):
    out = tmp_path / "answers.jsonl"
    result = weft("generate", "--base-model", "tiny", "--data", rows, "--out", out)
    assert result.out == f"3 answers are in {out}\n"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["where"] for line in lines] == [f"{rows} line {i}" for i in (1, 2, 3)]
    assert all(line["adapter"] == "base" and line["reference"].isupper() for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_generate_when_several_answers_with_logprobs_are_wanted_then_each_has_a_line(weft):
    lines = weft(
        "generate", "--base-model", "tiny", "--prompt", "planet", "--prompt", "garden", "--temperature", 3, "--n", 2,
        "--top-k", 50, "--min-p", 0.001, "--max-new-tokens", 5, "--logprobs", 1, "--json",
    ).out.splitlines()  # fmt: skip
    records = [json.loads(line) for line in lines]
    assert [(r["where"], r["sample"]) for r in records] == [(f"--prompt {i}", k) for i in (1, 2) for k in (0, 1)]
    assert records[0]["answer"] != records[1]["answer"]
    for record in records:
        assert "".join(token["token"] for token in record["logprobs"]) == record["answer"]
        assert all(len(token["top"]) == 1 >= 0 >= token["logprob"] for token in record["logprobs"])


def test_generate_when_a_stop_text_comes_then_the_answer_ends_before_it(weft):
    options = ("generate", "--base-model", "tiny", "--prompt", "planet", "--json")
    answer, cut = (json.loads(weft(*options, *more).out)["answer"] for more in ((), ("--stop", "x", "--stop", "ne")))
    assert (answer, cut) == ("planet", "pla")


def test_generate_when_repetition_is_penalised_then_the_answer_is_another(weft):
    options = ("generate", "--base-model", "tiny", "--prompt", "planet", "--json")
    answers = [json.loads(weft(*options, *more).out)["answer"] for more in ((), ("--repetition-penalty", 50))]
    assert answers[0] == "planet" != answers[1]


def test_generate_when_drawing_then_the_seed_decides(weft):
    def draw(seed: int) -> str:
        return weft(
            "generate", "--base-model", "tiny", "--prompt", "planet", "--temperature", 3, "--top-p", 0.95,
            "--seed", seed, "--max-new-tokens", 20, "--json",
        ).out  # fmt: skip

    assert draw(1) == draw(1) != draw(2)


def test_generate_when_drawing_then_an_adapters_answers_do_not_depend_on_the_others(weft, adapters: Path):
    def draw(*names: str) -> list[str]:
        voices = [word for name in names for word in ("--adapter", adapters / name if name != "base" else name)]
        lines = weft(
            "generate", *voices, "--prompt", "planet", "--prompt", "planet", "--temperature", 3,
            "--max-new-tokens", 12, "--json",
        ).out.splitlines()  # fmt: skip
        return [record["answer"] for line in lines if (record := json.loads(line))["adapter"] == "strong"]

    alone = draw("strong")
    assert draw("base", "idle", "strong") == draw("strong", "base") == alone
    assert alone[0] != alone[1], "a voice's own prompts draw independently"


def test_generate_when_a_job_had_its_own_chat_template_then_its_adapter_is_prompted_with_it(
    weft, rows: Path, tmp_path: Path
):
    jobs = {
        "base_model": "tiny",
        "defaults": {"train_data": str(rows), "max_length": 64, "max_steps": 1, "adapter": {"r": 2}},
        "jobs": [{"name": "own", "chat_template": SHOUTING}, {"name": "plain"}],
    }
    (tmp_path / "jobs.yaml").write_text(json.dumps(jobs))
    assert weft("train", tmp_path / "jobs.yaml", "--out", tmp_path / "run").code == 0
    own, plain = tmp_path / "run" / "own", tmp_path / "run" / "plain"
    assert (own / "adapter" / "chat_template.jinja").read_text() == SHOUTING
    assert not (plain / "adapter" / "chat_template.jinja").exists()
    result = weft(
        "generate", "--adapter", own, "--adapter", plain, "--adapter", "base", "--prompt", "planet", "--json"
    )  # fmt: skip
    prompts = [json.loads(line)["prompt"] for line in result.out.splitlines()]
    ordinary = "<|user|>planet<|end|><|assistant|>"
    assert prompts == ["[USER] planet<|end|>[ASSISTANT] ", ordinary, ordinary]


def test_generate_when_an_adapters_chat_template_is_broken_then_names_its_file(
    refused, templated: Path, tmp_path: Path
):
    broken = shutil.copytree(templated, tmp_path / "broken")
    for text, sentence in (
        ("{{ messages", "is not a valid Jinja template: unexpected end of template"),
        ("chatml", "'chatml' is not a Jinja template"),
        (b"\xff", "is not UTF-8 text."),
    ):
        (broken / "chat_template.jinja").write_bytes(text if isinstance(text, bytes) else text.encode())
        message = refused("generate", "--adapter", broken, "--prompt", "x")
        assert message.startswith(f"{broken}/chat_template.jinja: {sentence}")


def test_generate_when_the_base_is_stated_then_an_adapter_of_another_runs_with_a_note(weft, other_base: Path):
    result = weft("generate", "--adapter", other_base, "--base-model", "tiny", "--prompt", "planet", "--json")
    assert result.code == 0
    assert "note: foreign was trained on owner/other, not on tiny." in result.err
    assert json.loads(result.out)["adapter"] == "foreign"


ANSWER_LENGTHS = "at least 1 and at most 1,000,000"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "x", "--data", "y.jsonl"], "--prompt and --data are both given; keep one."),
        ([], "there is nothing to answer; give --prompt TEXT or --data FILE."),
        (["--prompt", " "], "--prompt: the prompt is empty."),
        (["--prompt", "\udcff"], "the prompt: is not UTF-8 text."),
        (["--prompt", "x", "--temperature", "-1"], "--temperature: must be 0 or at least 0.001, got -1."),
        (["--prompt", "x", "--temperature", "nan"], "--temperature: must be 0 or at least 0.001, got nan."),
        (["--prompt", "x", "--temperature", "1e-30"], "--temperature: must be 0 or at least 0.001, got 1e-30."),
        (["--prompt", "x", "--top-p", "0"], "--top-p: must be above 0 and at most 1, got 0."),
        *(
            (
                ["--prompt", "x", "--max-new-tokens", given],
                f"--max-new-tokens: must be {ANSWER_LENGTHS}, got {message}.",
            )
            for given, message in (("0", "0"), ("100000000", "100,000,000"))
        ),
        (["--prompt", "x", "--top-k", "-1"], "--top-k: must be at least 0 and at most 2147483647, got -1."),
        (["--prompt", "x", "--min-p", "2"], "--min-p: must be at least 0 and at most 1, got 2."),
        (
            ["--prompt", "x", "--repetition-penalty", "0"],
            "--repetition-penalty: must be above 0 and at most 100, got 0.",
        ),
        (["--prompt", "x", "--n", "0"], "--n: must be at least 1 and at most 128, got 0."),
        (["--prompt", "x", "--stop", ""], "--stop: is empty; write the text that ends an answer."),
        (["--prompt", "x", "--logprobs", "21", "--json"], "--logprobs: must be at least 0 and at most 20, got 21."),
        (
            ["--prompt", "x", "--logprobs", "1"],
            "--logprobs: log-probabilities are written with --json or --out FILE; add one.",
        ),
        (["--prompt", "x", "--seed", "-1"], "--seed: must be at least 0 and below 4294967296, got -1."),
        (["--prompt", "x", "--device", "gpu"], "device: got 'gpu'; accepted are auto, cpu, cuda. Did you mean cuda?"),
        (["--prompt", "x", "--out", "no/such/out.jsonl"], "--out no/such/out.jsonl: its directory does not exist."),
        (["--prompt", "x", "--out", "."], "--out .: is a directory; name a file."),
    ],
)
def test_generate_when_an_option_is_wrong_then_names_it(refused, arguments: list[str], sentence: str):
    assert refused("generate", "--base-model", "tiny", *arguments) == sentence


def test_generate_when_neither_adapter_nor_model_is_given_then_requests_one(refused):
    assert refused("generate", "--prompt", "x") == "there is neither an adapter nor a model; give --base-model."


def test_generate_when_an_adapter_cannot_be_used_then_gives_the_reason(
    refused, adapters: Path, other_base: Path, pickled: Path, tmp_path: Path
):
    def why(*given: object) -> str:
        options = [word for one in given for word in ("--adapter", one)]
        return refused("generate", *options, "--prompt", "x")

    assert why(tmp_path / "gone") == f"{tmp_path / 'gone'}: there is no such adapter directory."
    assert why(tmp_path) == f"{tmp_path / 'adapter_config.json'}: is missing."
    assert why(pickled) == f"{pickled / 'adapter_model.bin'}: is a pickle file; save it as safetensors."
    assert why(adapters) == f"{adapters}: holds a whole run. Name the directory of one of its jobs: idle, strong."
    waiting = adapters / "waiting"
    assert why(waiting) == f"{waiting}: the job has no adapter yet; it is written when the job ends."
    idle = adapters / "idle"
    assert why(idle, idle) == f"{idle}: there are two adapters 'idle'; name them: NAME=DIR."
    assert "base means the bare model" in why(f"base={idle}")
    assert why(idle, other_base) == (
        "the adapters were trained on different base models (idle on tiny and foreign on owner/other); run them one by "
        "one, or choose with --base-model."
    )


def test_generate_when_the_prompt_is_longer_than_the_model_allows_then_reports_it(refused):
    sentence = refused("generate", "--base-model", "tiny", "--prompt", "x" * 1100)
    assert sentence == "--prompt 1: the prompt has 1,103 tokens; the backbone has 1,024 positions."
