"""The word check reports words of the list where they are our own, with their lines, and nothing else."""

from __future__ import annotations

import pytest

from scripts.check_words import WordList, findings

LIST = WordList.read("both\ttell|told\tsend\nname\tplace\tindex\ntext\tbehind(?! a url)\tafter\n")


def reported(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [(each.line, each.word) for each in sorted(findings(path, LIST), key=lambda each: (each.line, each.word))]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def tell_all(x):\n    pass\n", [(1, "tell_all (tell)")]),
        ("class ToldTwice:\n    num_places = 1\n    place: int\n", [(1, "ToldTwice (told)"), (3, "place")]),
        ("import os as told\n", [(1, "told")]),
        ("replace, in_place, teller = 1, 2, 3\nother.tell()\n", []),
        ("# It is told\nx = 1\n", [(1, "told")]),
        ('"""Title.\n\nTells nothing; told twice, after `told`.\n"""\n', [(3, "told")]),
        ('def f():\n    """It was told."""\n\n\nx = "what we tell"\n', [(2, "told"), (5, "tell")]),
        ('x = "told"\ny = f"was told {told} of it"\n', [(2, "told")]),
        ('x = "a step behind a URL, and one behind it"\n', [(1, "behind")]),
    ],
)
def test_findings_when_code_is_read_then_names_comments_and_sentences_are_checked(tmp_path, code, words):
    assert reported(tmp_path, "a.py", code) == words


def test_findings_when_a_document_is_read_then_its_code_is_not_checked(tmp_path):
    text = "It told us `told`.\n\n```bash\ntold\n```\ntold\n"
    assert reported(tmp_path, "a.md", text) == [(1, "told"), (6, "told")]


def test_word_list_when_a_folder_is_exempt_then_its_files_are_left_out(tmp_path):
    for name in ("a/x.py", "a/b/y.py", "a/b/z.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert WordList.read("clean\ta\nexempt\ta/b/y.py").files(tmp_path) == [tmp_path / "a/b/z.md", tmp_path / "a/x.py"]
