"""Reports words that a reader would have to decode, with what to write instead: `python scripts/check_words.py`.

It reads identifiers where they are defined, docstrings, comments and sentences in the code, and the prose of documents.
`plain_words.txt` has the words, and the folders that are checked so far.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = Path(__file__).with_name("plain_words.txt")
ROOT = WORDS.parents[1]
QUOTED = re.compile(r"`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”")
"""Code and quotations."""
DELIMITERS = re.compile(r"^[rRbBfFuU]*(?:\"{3}|'{3}|[\"'])|(?:\"{3}|'{3}|[\"'])$")
"""Prefix and quotation marks of a string."""


@dataclass
class WordList:
    """Patterns for identifiers and for texts, and the files they apply to."""

    clean: list[str] = field(default_factory=list)
    exempt: list[str] = field(default_factory=list)
    name: list[tuple[re.Pattern[str], str]] = field(default_factory=list)
    text: list[tuple[re.Pattern[str], str]] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> WordList:
        words = cls()
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            kind, pattern, *instead = line.split("\t")
            rule = (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), *instead)
            for where in ("name", "text") if kind == "both" else (kind,):
                getattr(words, where).append(rule if instead else pattern)
        return words

    def files(self, root: Path) -> list[Path]:
        found = []
        for folder in self.clean:
            path = root / folder
            found += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md")]
        exempt = [root / path for path in self.exempt]
        return sorted({path for path in found if not any(path == e or e in path.parents for e in exempt)})


@dataclass(frozen=True)
class Finding:
    """A word of the list in a file."""

    line: int
    word: str
    instead: str


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier with the line that defines it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Comments and sentences with their lines; a string of one word is a key or a value and no sentence."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("STRING", "FSTRING_MIDDLE"):
            is_docstring = kind == "STRING" and token.string.lstrip("rRbBfFuU").startswith('"""')
            # Without its own quotation marks, which would make a quotation of a docstring of one line.
            text = DELIMITERS.sub("", re.sub(r"\{[^{}\n]*\}", "{}", token.string))
            if is_docstring or " " in text.strip():
                yield from ((token.start[0] + i, line) for i, line in enumerate(text.split("\n")))
        elif kind == "COMMENT":
            yield token.start[0], token.string


def prose_of(document: str) -> Iterator[tuple[int, str]]:
    """Lines of a document outside its blocks of code."""
    in_code = False
    for number, line in enumerate(document.split("\n"), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code:
            yield number, line


def findings(path: Path, words: WordList) -> Iterator[Finding]:
    source = path.read_text("utf-8")
    is_code = path.suffix == ".py"
    for line, name in names_of(ast.parse(source)) if is_code else ():
        spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name)
        for pattern, instead in words.name:
            if (match := pattern.search(spelled)) and "in place" not in spelled.lower():
                yield Finding(line, f"{name} ({match[0].lower()})" if match[0] != name else name, instead)
    for line, text in texts_of(source) if is_code else prose_of(source):
        for pattern, instead in words.text:
            yield from (Finding(line, match[0], instead) for match in pattern.finditer(QUOTED.sub("`", text)))


def main(paths: list[str]) -> int:
    words = WordList.read(WORDS.read_text("utf-8"))
    reports = []
    for path in [Path(p).resolve() for p in paths] or words.files(ROOT):
        ordered = sorted(set(findings(path, words)), key=lambda each: (each.line, each.word))
        reports += [f"{path.relative_to(ROOT)}:{each.line}: {each.word} → {each.instead}" for each in ordered]
    sys.stdout.writelines(f"{report}\n" for report in reports)
    return int(bool(reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
