"""Imports transformers without the parts of it that nobody here waits for; what it is afterwards is the same.

At its import transformers reads the 3,300 files of all its models line by line, twice, to know what they define, and
imports scipy's optimizers for losses of object detection: 1.2 of 6.6 s of processor time from `weft train` to its first
step (busy Neoverse-N1, November 2026, transformers 5.23). Here each file is read once and searched from its end, and
those optimizers are imported when somebody asks for them. A version of transformers that has other functions than
these is imported as it is.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

READER = "transformers.utils.import_utils"
"""The module that reads what models define."""
OPTIMIZERS = "scipy.optimize"


@contextmanager
def importing_quickly() -> Iterator[None]:
    """What is imported of transformers inside is imported in less time."""
    finder, late = _Finder(), _Late(OPTIMIZERS)
    sys.meta_path.insert(0, finder)
    is_late = sys.modules.setdefault(OPTIMIZERS, late) is late
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if is_late:
            late.leave()


class _Late(ModuleType):
    """Stands for a module until somebody calls what transformers takes of it, or asks for anything else."""

    def leave(self) -> None:
        """Lets the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules asks for those
            raise AttributeError(name)
        if name == "linear_sum_assignment":
            return lambda *args, **settings: getattr(self._real(), name)(*args, **settings)
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        self.leave()
        return importlib.import_module(self.__name__)


class _Finder:
    """Finds the reader as Python does, and hastens it once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for all other modules."""
        found = importlib.machinery.PathFinder.find_spec(name, path, target) if name == READER else None
        if found is None or found.origin is None or type(found.loader) is not importlib.machinery.SourceFileLoader:
            return None
        return importlib.util.spec_from_file_location(name, found.origin, loader=_Loader(name, found.origin))


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, quick in (("fetch__all__", _from_the_end), ("create_import_structure_from_path", _by_folder)):
            if callable(whole := getattr(module, name, None)):
                setattr(module, name, quick(whole))


def _from_the_end(whole: Callable[[str], Any]) -> Callable[[str], Any]:
    """Looks for the last line that begins with `__all__`, as `whole` does, but not line by line."""
    return lambda text: whole(text[text.rfind("\n__all__") + 1 :])


def _by_folder(whole: Callable[[str], Any]) -> Callable[[str | os.PathLike[str]], Any]:
    """Asks for the folder of a file, as `whole` would look at; it remembers what it has answered."""

    def quick(path: str | os.PathLike[str]) -> Any:
        return whole(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))

    return quick
