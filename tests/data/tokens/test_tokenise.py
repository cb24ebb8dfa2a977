from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import supervised_text
from tiny_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast

from weft.data.chat_template import ChatTemplate
from weft.data.chats import ChatTurn, Conversation, Rendered, Tokens
from weft.data.render import Renderer
from weft.data.samples import Sample
from weft.data.tokenise import _weights, leading_bos, sample_of_tokens, tokenise, tokenise_prompt
from weft.errors import DataError

MERGES = (("4", "2"), ("Ġ", "42"), ("Ċ", "Ċ"))  # "42", " 42" and two line ends become one token each
TRIMMING = {trims: make_tokenizer(merges=MERGES, trims_offsets=trims) for trims in (False, True)}


def bare(prompt: str, completion: str) -> Rendered:
    return Rendered(prompt + completion, ((len(prompt), len(prompt + completion)),), True, "x line 1")


def one(rendered: Rendered, tokenizer: Any) -> Sample:
    (sample,) = tokenise([rendered], tokenizer)
    return sample


class SlowTokenizer:
    """A tokenizer that does not know which characters a token came from."""

    is_fast = False

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_tokenise_when_a_text_is_longer_than_the_model_allows_then_transformers_keeps_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Our own sentence explains what is done about it."""
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    assert len(tokenise_prompt(bare("far too long", ""), tokenizer)) == 12
    assert one(bare("far too", " long"), tokenizer).length == 13
    assert one(bare("far too", " long"), SlowTokenizer(tokenizer)).length == 13
    assert caplog.records == []
    tokenizer.encode("far too long")
    assert caplog.records, "the warning is still there to be kept quiet"


def test_tokens_when_chat_is_tokenised_then_are_those_of_the_whole_text(tokenizer: PreTrainedTokenizerFast):
    messages = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "où? 😀"}]
    chat = Conversation((ChatTurn("user", "héllo"), ChatTurn("assistant", "où? 😀", True)))
    sample = one(Renderer(ChatTemplate(tokenizer)).render(chat, "x")[0], tokenizer)
    assert sample.tokens.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    assert supervised_text(sample, tokenizer) == ["où? 😀<|im_end|>\n"]


def test_bos_when_the_template_writes_it_then_it_is_not_doubled():
    tokenizer = make_tokenizer(template="<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}", adds_bos=True)
    chat = Conversation((ChatTurn("user", "a"), ChatTurn("assistant", "b", True)))
    sample = one(Renderer(ChatTemplate(tokenizer)).render(chat, "x")[0], tokenizer)
    assert tokenizer.convert_ids_to_tokens(sample.tokens.tolist()) == ["<s>", "a", "</s>", "b", "</s>"]


def test_bare_text_when_tokenised_then_gets_the_bos_the_tokenizer_adds_and_eos(
    tokenizer: PreTrainedTokenizerFast, base_tokenizer: PreTrainedTokenizerFast
):
    with_bos = one(bare("ab", "cd"), base_tokenizer)
    assert base_tokenizer.convert_ids_to_tokens(with_bos.tokens.tolist()) == ["<s>", "a", "b", "c", "d", "</s>"]
    assert with_bos.supervised.tolist() == [False, False, False, True, True, True]
    # This one also has a BOS token, but never puts it in front of a text.
    without = one(bare("ab", "cd"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(without.tokens.tolist()) == ["a", "b", "c", "d", "</s>"]
    assert (leading_bos(tokenizer), len(leading_bos(base_tokenizer))) == ([], 1)


def test_bare_text_when_it_brings_its_own_bos_and_eos_then_they_are_not_doubled(
    base_tokenizer: PreTrainedTokenizerFast,
):
    sample = one(bare("<s>a", "b</s>"), base_tokenizer)
    assert base_tokenizer.convert_ids_to_tokens(sample.tokens.tolist()) == ["<s>", "a", "b", "</s>"]
    assert sample.supervised.tolist() == [False, False, True, True]


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_token_when_it_would_reach_from_the_prompt_into_the_answer_then_the_text_is_cut_there(trims_offsets: bool):
    tokenizer = make_tokenizer(merges=MERGES, template=None, trims_offsets=trims_offsets)
    assert len(tokenizer.encode("A: 42")) == 3
    sample = one(bare("A: ", "42"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(sample.tokens.tolist()) == ["A", ":", "Ġ", "42", "</s>"]
    assert supervised_text(sample, tokenizer) == ["42</s>"]
    assert sample.tokens.tolist()[:3] == tokenise_prompt(bare("A: ", ""), tokenizer).tolist()


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_token_when_it_starts_with_the_space_of_the_answer_then_it_stays_whole(trims_offsets: bool):
    tokenizer = make_tokenizer(merges=MERGES, template=None, trims_offsets=trims_offsets)
    sample = one(bare("A:", " 42"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(sample.tokens.tolist()) == ["A", ":", "Ġ42", "</s>"]
    assert sample.supervised.tolist() == [False, False, True, True]


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_space_before_an_answer_when_offsets_are_trimmed_then_is_still_prompt(trims_offsets: bool):
    tokenizer = make_tokenizer(trims_offsets=trims_offsets)
    chat = Conversation((ChatTurn("user", "a"), ChatTurn("assistant", "b", True), ChatTurn("user", "c")))
    sample = one(Renderer(ChatTemplate(tokenizer)).render(chat, "x")[0], tokenizer)
    assert supervised_text(sample, tokenizer) == ["b<|im_end|>\n"]


def test_slow_tokenizer_when_used_then_gives_the_same_samples(tokenizer: PreTrainedTokenizerFast):
    chat = Conversation(
        (
            ChatTurn("user", "é"),
            ChatTurn("assistant", "b", True),
            ChatTurn("user", "c"),
            ChatTurn("assistant", "d", True),
        )
    )
    rendered = Renderer(ChatTemplate(tokenizer)).render(chat, "x")[0]
    fast, slow = one(rendered, tokenizer), one(rendered, SlowTokenizer(tokenizer))
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert fast.supervised.tolist() == slow.supervised.tolist()


def test_many_texts_when_tokenised_in_several_calls_then_keep_their_order(tokenizer: PreTrainedTokenizerFast):
    samples = list(tokenise([bare(f"{i}:", "x") for i in range(2500)], tokenizer))
    assert [tokenizer.decode(s.tokens.tolist()) for s in samples] == [f"{i}:x</s>" for i in range(2500)]


def test_ids_made_elsewhere_when_the_tokenizer_does_not_know_one_then_names_it(tokenizer: PreTrainedTokenizerFast):
    sample = sample_of_tokens(Tokens((1, 2, 3), (True, False, True)), tokenizer, False, "x line 1")
    assert sample.supervised.tolist() == [False, False, True]
    assert sample_of_tokens(Tokens((1, 2), (True, False)), tokenizer, True, "x").num_supervised == 1
    with pytest.raises(DataError, match=r"^x line 1: token 1 is 260, but the tokenizer knows 260 tokens"):
        sample_of_tokens(Tokens((1, 260), (True, True)), tokenizer, False, "x line 1")


def listed_weights(offsets: list[tuple[int, int]], item: Rendered) -> list[float] | None:
    """What `tokenise` finds by bisection, from the characters of every token."""
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    reached = np.maximum.accumulate(np.concatenate([[0], bounds[:, 1]]))[:-1]
    starts = np.minimum(bounds[:, 0], reached)
    weights = np.zeros(len(bounds))
    for (start, end), weight in item.weighted_spans:
        if np.any((starts < start) & (start < bounds[:, 1])):
            return None
        weights[(start <= starts) & (starts < end)] = weight
    return weights.tolist()


@given(
    st.lists(st.text(alphabet="a 42\n\u00e9\U0001f600<s>|", max_size=12), min_size=1, max_size=6),
    st.sampled_from([False, True]),
)
def test_borders_when_found_by_bisection_then_are_those_of_all_tokens(pieces: list[str], trims_offsets: bool):
    """Merged tokens, spaces, accents and special tokens may lie on the border of what is trained."""
    tokenizer = TRIMMING[trims_offsets]
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = tuple((end - len(piece), end) for piece, end in zip(pieces, ends, strict=True))[::2]
    item = Rendered("".join(pieces), spans, False, "x", tuple(1.0 + i for i in range(len(spans))))
    (encoding,) = tokenizer([item.text], add_special_tokens=False).encodings
    found = _weights(encoding.token_to_chars, len(encoding.ids), item)
    assert (None if found is None else found.tolist()) == listed_weights(encoding.offsets, item)
