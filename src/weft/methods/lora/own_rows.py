"""Rows of the input embedding and of the output head that an adapter has of its own, as its settings name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import ConfigError

EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
"""What families call the input embedding."""
OUTPUT_HEADS = ("lm_head", "embed_out")
"""What families call the output head."""
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class OwnRows:
    """Which rows are an adapter's own."""

    inputs: TokenIds | None = None
    """Tokens whose rows of the input embedding are; of a head that is tied to it, the same rows are."""
    outputs: TokenIds | None = None
    """Tokens whose rows of an output head that is not tied are."""
    all_inputs: bool = False
    """Whether the whole input embedding is."""
    all_outputs: bool = False
    """Whether the whole output head is."""

    def __bool__(self) -> bool:
        return self != OwnRows()

    @classmethod
    def of(cls, indices: TokenIds | Mapping[str, TokenIds] | None, modules_to_save: tuple[str, ...] | None) -> OwnRows:
        """Those of two settings; ConfigError for what no adapter can have."""
        if isinstance(indices, tuple):
            by_module: Mapping[str, TokenIds] = {EMBEDDINGS[0]: indices}
        else:
            by_module = indices or {}
        found = cls()
        for name, ids in by_module.items():
            where = "trainable_token_indices" + ("" if isinstance(indices, tuple) else f".{name}")
            _check_ids(ids, where)
            found = found._with(name, where, ids)
        for name in modules_to_save or ():
            found = found._with(name, "modules_to_save", None)
        return found

    def count(self, vocabulary: int) -> int:
        """How many they are, on a backbone of so many tokens."""
        some = sum(len(ids) for ids in (self.inputs, self.outputs) if ids is not None)
        return some + vocabulary * (self.all_inputs + self.all_outputs)

    def _with(self, name: str, where: str, ids: TokenIds | None) -> OwnRows:
        """One more: some rows of a module, or without ids all of them."""
        is_output = is_output_head(name)
        if not is_output and name.rpartition(".")[2] not in EMBEDDINGS:
            raise ConfigError(
                f"got {name!r}; accepted are embed_tokens, the input embedding, and lm_head, the output head.",
                where=where,
            )
        named, is_whole = (self.outputs, self.all_outputs) if is_output else (self.inputs, self.all_inputs)
        if named is not None or is_whole:
            part = "output head" if is_output else "input embedding"
            raise ConfigError(f"{name} is the {part}, whose rows are named already; keep one.", where=where)
        if is_output:
            return OwnRows(self.inputs, ids, self.all_inputs, ids is None)
        return OwnRows(ids, self.outputs, ids is None, self.all_outputs)


def is_output_head(name: str) -> bool:
    """Whether a module's name or path is that of an output head."""
    return name.rpartition(".")[2] in OUTPUT_HEADS


def _check_ids(ids: TokenIds, where: str) -> None:
    if not ids or min(ids) < 0:
        found = "the list is empty" if not ids else f"got {min(ids)}"
        raise ConfigError(f"{found}; expected ids of tokens, from 0 up.", where=where)
    if len(set(ids)) < len(ids):
        twice = next(one for place, one in enumerate(ids) if one in ids[:place])
        raise ConfigError(f"token {twice} is there twice.", where=where)
