"""Nothing in the package can unpickle: a checkpoint or an adapter never runs code."""

import ast
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        found += [n for n in names if n.split(".")[0] in FORBIDDEN_MODULES or n in ("torch.load", "torch.save")]
    return found


@pytest.mark.parametrize(
    "text", ["import pickle", "from pickle import loads", "from torch import load", "torch.load(f)"]
)
def test_unsafe_when_code_could_unpickle_then_it_is_found(text):
    assert unsafe(ast.parse(text))


def test_package_when_searched_then_nothing_imports_pickle_or_calls_torch_load():
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 10
    assert {str(p): unsafe(ast.parse(p.read_text())) for p in sources if unsafe(ast.parse(p.read_text()))} == {}
