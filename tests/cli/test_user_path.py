"""Paths on the command line are taken as a user means them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.options import user_path


def test_path_when_it_begins_with_a_tilde_then_is_in_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert user_path("~/runs/x") == Path("/home/ada/runs/x")
    assert user_path("runs/~x") == Path("runs/~x")


@pytest.mark.parametrize("verb", ["train", "sweep"])
@pytest.mark.parametrize("given", [["jobs.yaml", "--out", ""], [""]])
def test_path_when_it_is_empty_then_is_refused(refused, verb, given):
    where = "--out" if given[0] else "PATH"
    assert refused(verb, *given) == f"{where}: is empty; name a file or a directory."
