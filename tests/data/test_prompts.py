from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from weft.data.load import load_dataset, load_prompts, prompt_of, prompt_of_chat
from weft.errors import DataError

Write = Callable[..., str]


def test_prompts_when_loaded_then_are_the_front_of_the_training_samples(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, base_tokenizer: PreTrainedTokenizerFast
):
    name = write("test.jsonl", [{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}])
    for own in (tokenizer, base_tokenizer):
        samples = load_dataset([name], own, max_length=99, base_dir=tmp_path).samples
        prompts = load_prompts(name, own, base_dir=tmp_path)
        assert [prompt.reference for prompt in prompts] == ["4", "6"]
        assert [prompt.where for prompt in prompts] == ["test.jsonl line 1", "test.jsonl line 2"]
        for sample, prompt in zip(samples, prompts, strict=True):
            assert sample.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
            assert int(sample.supervised.argmax()) == len(prompt.tokens)


def test_prompts_when_rows_have_no_answer_then_the_reference_is_none(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    prompts = load_prompts(write("a.csv", "prompt\nhi\n"), tokenizer, base_dir=tmp_path)
    assert prompts[0].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0].reference is None


def test_prompts_when_a_text_file_is_given_then_each_text_is_continued_as_it_is(
    write: Write, tmp_path: Path, base_tokenizer: PreTrainedTokenizerFast
):
    prompts = load_prompts(write("a.txt", "once upon\na time\n"), base_tokenizer, base_dir=tmp_path)
    assert [prompt.text for prompt in prompts] == ["once upon", "a time"]
    assert prompts[0].tokens[0] == base_tokenizer.bos_token_id
    assert prompts[0].tokens[-1] != base_tokenizer.eos_token_id


def test_prompts_when_rows_are_token_ids_then_are_refused(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    with pytest.raises(DataError, match=r"^a\.jsonl line 1: token ids cannot be split"):
        load_prompts(write("a.jsonl", [{"input_ids": [1]}]), tokenizer, base_dir=tmp_path)


def test_prompt_when_typed_then_is_a_user_turn_if_there_is_a_template(
    tokenizer: PreTrainedTokenizerFast, base_tokenizer: PreTrainedTokenizerFast
):
    assert prompt_of("hi", tokenizer).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of("hi", base_tokenizer).text == "hi"
    assert prompt_of("hi", tokenizer, chat_template="Q: {{ messages[0].content }}\nA:").text == "Q: hi\nA:"
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_of("", tokenizer, chat_template="{{ '' }}")


TOOL_CHAT = [
    {"role": "user", "content": "rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Ghent"}'}}
        ],
    },
    {"role": "tool", "content": "none today", "tool_call_id": "1"},
]


def test_chat_prompt_when_the_template_knows_tools_then_shows_calls_and_results(
    tokenizer: PreTrainedTokenizerFast,
):
    """Arguments are objects to the template, as in training."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }} {{ c.function.arguments.at }}{% endfor %};{% endfor %}"
    )
    prompt = prompt_of_chat(TOOL_CHAT, tokenizer, chat_template=template)
    assert prompt.text == "user:rain?;assistant:weather Ghent;tool:none today;"


@pytest.mark.parametrize(
    ("template", "number"),
    [
        ("{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}", 1),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", 2),
    ],
)
def test_chat_prompt_when_the_template_leaves_a_tool_out_then_it_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, number: int
):
    with pytest.raises(
        DataError, match=rf"messages\[{number}\] is about a tool; this model's chat template has no place"
    ):
        prompt_of_chat(TOOL_CHAT, tokenizer, chat_template=template)
