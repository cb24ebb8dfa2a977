"""Tiny tokenizers and checks that the data tests share; nothing here needs the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from weft.data.sample import Sample
from weft.data.sources import read_rows
from weft.errors import DataError

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def make_tokenizer(
    *,
    merges: tuple[tuple[str, str], ...] = (),
    template: str | None = CHATML,
    adds_bos: bool = False,
    trims_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """One token per byte and one per merge, and the specials; merges are in the byte-level alphabet (Ġ is a space)."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    post: list[Any] = [processors.ByteLevel(trim_offsets=True)] if trims_offsets else []
    if adds_bos:
        post.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]))
    if post:
        core.post_processor = processors.Sequence(post)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def assert_rows_or_data_error(path: Path, data: bytes) -> None:
    """The file reads as rows, or fails with a DataError that names it; any other error passes through."""
    path.write_bytes(data)
    try:
        found: str | list[Any] = [row.values for row in read_rows(path.name, path.parent)]
    except DataError as error:
        found = str(error)
    assert found if isinstance(found, list) else found.startswith(path.name)


def supervised_text(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for token, supervised in zip(sample.tokens.tolist(), sample.supervised.tolist(), strict=True):
        if supervised and not before:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        before = supervised
    return [tokenizer.decode(run) for run in runs]
