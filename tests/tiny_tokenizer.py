"""A byte-level tokenizer made on the spot; nothing here imports Weft."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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


def word_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    """The words w0, w1 and so on, one token each; texts have white space between them."""
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2")
