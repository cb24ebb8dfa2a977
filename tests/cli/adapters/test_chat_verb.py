"""`weft chat`, with lines piped in and, for Ctrl-C and Ctrl-D, as if typed."""

from pathlib import Path

import pytest

from weft.cli.adapters import generate as chat_verb
from weft.data.load import prompt_of_chat
from weft.engine.inference.attach import Attached, load_with_adapters
from weft.model.source import load_tokenizer
from weft.spec.sampling import Decoding


def test_chat_when_lines_are_piped_then_prints_only_the_answers(weft, adapters: Path):
    result = weft("chat", "--adapter", adapters / "idle", typed="planet\n\ngarden\n")
    assert (result.code, result.out, result.err) == (0, "planet\ngarden\n", "")


def test_chat_when_a_line_or_the_system_prompt_is_not_text_then_reports_it(
    weft, refused, monkeypatch: pytest.MonkeyPatch
):
    def undecodable(shown: str = "") -> str:
        return b"\xff".decode()

    monkeypatch.setattr("builtins.input", undecodable)
    assert refused("chat", "--base-model", "tiny") == "standard input: is not UTF-8 text."
    monkeypatch.setattr("builtins.input", lambda shown="": "planet")
    assert refused("chat", "--base-model", "tiny", "--system", "\udcff") == "the chat: is not UTF-8 text."


def test_chat_when_commands_are_typed_then_runs_them(weft, adapters: Path):
    typed = "/adapter\n/adapter none\n/adapter base\nplanet\n/reset\n/dance\n/help\n/quit\nnever answered\n"
    result = weft("chat", "--adapter", adapters / "strong", "--adapter", "base", typed=typed)
    assert result.code == 0
    assert result.out.splitlines() == [
        "there are strong, base.",
        "there is no adapter 'none'; there are strong, base.",
        "You talk to base in a new conversation.",
        "planet",
        "A new conversation starts.",
        "unknown command /dance; /help lists them.",
        *chat_verb.HELP.splitlines(),
    ]


def test_chat_when_the_conversation_outgrows_the_model_then_ends_with_a_sentence(weft):
    result = weft("chat", "--base-model", "tiny", typed="planet\n" + "x" * 1100 + "\n")
    assert (result.code, result.out) == (2, "planet\n")
    assert (
        "the conversation has 1,119 tokens; the model has 1,024 positions. /reset starts a new conversation."
        in result.err
    )


def test_chat_when_an_adapter_has_its_own_chat_template_then_it_is_used_for_that_adapter_only(
    weft, adapters: Path, templated: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = []

    def remember(messages, tokenizer, *, chat_template):
        prompts.append(prompt_of_chat(messages, tokenizer, chat_template=chat_template))
        return prompts[-1]

    monkeypatch.setattr("weft.data.load.prompt_of_chat", remember)
    weft("chat", "--adapter", templated, "--adapter", adapters / "idle", typed="a\n/adapter idle\nb\n")
    assert [prompt.text for prompt in prompts] == ["[USER] a<|end|>[ASSISTANT] ", "<|user|>b<|end|><|assistant|>"]


def test_chat_when_options_are_wrong_then_names_them(refused, adapters: Path):
    assert refused("chat", "--adapter", adapters / "idle", "--top-p", 2).startswith("--top-p: must be above 0")
    assert refused("chat") == "there is neither an adapter nor a model; give --base-model."


def test_prompt_of_chat_when_turns_follow_each_other_then_renders_all_of_them():
    messages = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    prompt = prompt_of_chat([{"role": role, "content": text} for role, text in messages], load_tokenizer("tiny"))
    assert prompt.text == "<|system|>be brief<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"


def test_chat_when_typed_then_greets_prompts_and_leaves_at_the_end_of_input(weft):
    result = weft("chat", "--base-model", "tiny", typed="planet\n", interactive=True)
    assert result.code == 0
    assert result.out == "You talk to base on tiny. /help shows what else you can do.\nbase> planet\nbase> \n"


def test_chat_when_a_typed_turn_is_too_long_then_forgets_it_and_goes_on(weft):
    result = weft("chat", "--base-model", "tiny", typed="x" * 1100 + "\nplanet\n/quit\n", interactive=True)
    assert result.code == 0
    problem = "the conversation has 1,103 tokens; the model has 1,024 positions"
    assert result.err == f"error: {problem}. /reset starts a new conversation.\n"
    assert result.out.endswith("base> base> planet\nbase> ")


def test_chat_when_interrupted_at_the_prompt_then_leaves_politely(weft, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    result = weft("chat", "--base-model", "tiny", interactive=True)
    assert (result.code, result.err) == (0, "")


@pytest.fixture(scope="module")
def loaded() -> Attached:
    return load_with_adapters((), base_model="tiny")


def test_answer_when_interrupted_then_keeps_what_was_written_and_goes_on(
    loaded: Attached, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    talk = chat_verb.Talk(loaded, Decoding(max_new_tokens=20), None, interactive=True)
    take = chat_verb.AnswerStream.take

    def interrupted(stream: chat_verb.AnswerStream, which: int, token: int) -> None:
        take(stream, which, token)
        if stream.text == "pla":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_verb.AnswerStream, "take", interrupted)
        talk.read_line("planet")
    assert capsys.readouterr().out == "pla\n(stopped)\n"
    # The backbone takes up any pattern of a conversation, so the next answer shows that the cut one was kept.
    talk.read_line("garden")
    assert capsys.readouterr().out == "gar\n"


def test_stream_when_a_character_spans_tokens_then_prints_it_once_it_is_whole(
    loaded: Attached, capsys: pytest.CaptureFixture[str]
):
    stream = chat_verb.AnswerStream(loaded.backbone.tokenizer)
    printed = []
    for token in loaded.backbone.tokenizer.encode("né!", add_special_tokens=False):
        stream.take(0, token)
        printed.append(capsys.readouterr().out)
    assert printed == ["n", "", "é", "!"]
    stream.end()
    assert capsys.readouterr().out == "\n"
