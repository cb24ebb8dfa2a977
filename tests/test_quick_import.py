"""transformers that is imported quickly is the one that is imported as it is."""

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy as np
import pytest
import transformers.utils.import_utils as as_it_is

from weft.quick_import import OPTIMIZERS, READER, importing_quickly

MODELS = Path(as_it_is.__file__).parents[1] / "models"


def loaded_quickly(folder):
    """The reader, or what lies in its place in `folder`, as it is inside; nobody else gets to see it."""
    with importing_quickly():
        finder = sys.meta_path[0]
    spec = finder.find_spec(READER, [str(folder)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quick():
    return loaded_quickly(Path(as_it_is.__file__).parent)


def test_structure_of_all_models_when_read_quickly_then_is_the_same(quick):
    assert quick.fetch__all__.__module__ != as_it_is.fetch__all__.__module__
    expected = as_it_is.define_import_structure(str(MODELS))
    assert quick.define_import_structure(MODELS) == expected
    assert quick.define_import_structure(str(MODELS / "__init__.py")) == expected


def test_structure_when_asked_by_a_file_of_the_folder_then_nothing_is_read_again(quick):
    ask = quick.create_import_structure_from_path
    assert ask(MODELS / "llama") is ask(str(MODELS / "llama" / "__init__.py"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1\n",
        '__all__ = ["First"]',
        'import os\n__all__ = ["A", "B"]\n',
        'x = "__all__"\n',
        '__all__ = ["Early"]\nx = 1\n__all__ = [\n    "A",\n    "B",\n]\n',
        '__all__ = ["Early"]\n\x0c__all__ = ["Late"]\n',
        "y = 1\n__all__ = [\n",
    ],
)
def test_names_when_searched_from_the_end_then_are_those_of_the_last_line(quick, text):
    assert quick.fetch__all__(text) == as_it_is.fetch__all__(text)


def test_reader_when_it_has_other_functions_then_is_as_it_is(tmp_path):
    (tmp_path / "import_utils.py").write_text("fetch__all__ = None\ndef read(): return 5\n")
    module = loaded_quickly(tmp_path)
    assert module.fetch__all__ is None
    assert module.read() == 5 and not hasattr(module, "create_import_structure_from_path")


def test_optimizers_when_taken_inside_then_are_imported_at_the_first_call(monkeypatch):
    real = importlib.import_module(OPTIMIZERS)
    cost = np.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    monkeypatch.delitem(sys.modules, OPTIMIZERS)
    with importing_quickly():
        from scipy.optimize import linear_sum_assignment

        assert not hasattr(sys.modules[OPTIMIZERS], "__file__")
    assert OPTIMIZERS not in sys.modules
    rows, columns = linear_sum_assignment(cost, maximize=True)
    assert OPTIMIZERS in sys.modules
    assert [*columns[rows]] == [*real.linear_sum_assignment(cost, maximize=True)[1]]


def test_optimizers_when_more_is_asked_for_inside_then_are_imported_there(monkeypatch):
    real = importlib.import_module(OPTIMIZERS)
    monkeypatch.delitem(sys.modules, OPTIMIZERS)
    with importing_quickly():
        from scipy.optimize import milp

        assert isinstance(sys.modules[OPTIMIZERS].__loader__, SourceFileLoader)
    assert milp.__name__ == real.milp.__name__ and OPTIMIZERS in sys.modules


def test_importing_quickly_when_it_ends_then_nothing_of_it_is_left():
    finders, known = list(sys.meta_path), sys.modules.get(OPTIMIZERS)
    with pytest.raises(KeyError), importing_quickly():
        raise KeyError
    assert sys.meta_path == finders and sys.modules.get(OPTIMIZERS) is known
