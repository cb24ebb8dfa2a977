"""Samples with labels: texts with a class, and words with a class each, tokenised as other trainers do."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.data.chat.chat_template import Tokenizer
from weft.data.conversation import Passage, Words
from weft.data.sample import Sample
from weft.errors import ConfigError


def sample_of_passage(passage: Passage, tokenizer: Tokenizer) -> Sample:
    """The text with the special tokens that the tokenizer adds around one; its last token has the label."""
    ids = tokenizer.encode(passage.text, add_special_tokens=True, verbose=False)
    tokens = np.array(ids, dtype=np.int32)
    return Sample(tokens, np.zeros(len(tokens), np.bool_)).labelled_end(passage.label)


def sample_of_words(words: Words, tokenizer: Tokenizer, where: str) -> Sample:
    """The words one after the other; the first token of each has its label."""
    if not tokenizer.is_fast:
        raise ConfigError("this tokenizer does not map tokens to words.", where="objective")
    encoded: Any = tokenizer(list(words.words), is_split_into_words=True, verbose=False)
    labels = np.full(len(encoded["input_ids"]), np.nan, dtype=np.float32)
    before = None
    for index, word in enumerate(encoded.word_ids()):
        if word is not None and word != before and words.labels[word] is not None:
            labels[index] = words.labels[word]
        before = word
    return Sample(np.array(encoded["input_ids"], dtype=np.int32), ~np.isnan(labels), None, labels)
