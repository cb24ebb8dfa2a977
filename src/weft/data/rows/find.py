"""Resolves the name of a data source: a file, a folder, files by a pattern, or a data set of the Hugging Face Hub.

| name | what is read |
|---|---|
| `train.jsonl`, `train.jsonl.gz` | the file |
| `data/` | its files of the kinds in `READERS`, sorted by name |
| `data/*.jsonl`, `data/**/*.csv` | the files that match, sorted by path |
| a folder of `save_to_disk` | its arrow files, in the order of its `state.json` |
| `owner/name:config:split` | a data set of the Hub |
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable
from pathlib import Path

from weft.data.rows.compression import OPENERS, is_compressed, kind_of
from weft.data.rows.row import Row
from weft.data.rows.sources import BINARY, HUB_NAME, READERS, TABLES, DataFile, Source
from weft.errors import DataError, closest

SAVED_STATE, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a data set, and into a folder of several."""


def find_source(name: str, base_dir: Path, *, has_header: bool = True, max_rows: int | None = None) -> Source:
    """The files, or the Hub data set, of a name; a DataError if there is nothing to read.

    A relative path is relative to `base_dir`; errors name the source as the user wrote it.
    """
    path = base_dir / os.path.expanduser(name)
    if os.path.isdir(path):
        names = [os.path.join(name, each) for each in _names_of_folder(path, name)]
    elif os.path.exists(path):
        names = [name]
    elif is_pattern(name):
        names = _matching_names(name, base_dir)
    elif HUB_NAME.fullmatch(name) is not None and not _is_data(path):
        return Source(name, (), max_rows)
    else:
        raise _no_such_file(name, path, base_dir)
    files = tuple(DataFile(each, base_dir / os.path.expanduser(each), has_header) for each in names)
    for file in files:
        _check(file)
    return Source(name, files, max_rows)


def is_pattern(name: str) -> bool:
    """True if a name is a pattern of file names."""
    return glob.has_magic(name) and HUB_NAME.fullmatch(name) is None


def read_rows(source: str, base_dir: Path, *, has_header: bool = True) -> list[Row]:
    return list(find_source(source, base_dir, has_header=has_header).rows())


def _check(file: DataFile) -> None:
    """DataError for a file of an unknown kind."""
    if not file.path.is_file():
        raise DataError("is not a regular file.", where=file.name)
    if not _is_data(file.path):
        last = "".join(file.path.suffixes[-2:]) if is_compressed(file.path) else file.path.suffix
        problem = f"the suffix {last!r}" if last else "no suffix"
        raise DataError(f"has {problem}; accepted are {_accepted()}.", where=file.name)
    if not file.has_header and file.kind not in TABLES:
        raise DataError(f"is no table ({', '.join(TABLES)}), whose columns have numbers; name them.", where=file.name)


def _is_data(path: Path) -> bool:
    kind = kind_of(path)
    return kind in READERS and not (kind in BINARY and is_compressed(path))


def _accepted() -> str:
    return f"{', '.join(READERS)}, and text files with {' or '.join(OPENERS)} added"


def _names_of_folder(path: Path, name: str) -> list[str]:
    """Names of the data files in a folder, sorted."""
    try:
        inside = sorted(os.listdir(path))
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error}).", where=name) from None
    if SAVED_SPLITS in inside:
        splits = [each for each in inside if (path / each / SAVED_STATE).is_file()]
        example = os.path.join(name, "train" if "train" in splits or not splits else splits[0])
        raise DataError(f"holds the splits {', '.join(splits)}; name one of them, such as {example}.", where=name)
    if SAVED_STATE in inside and any(kind_of(Path(each)) == ".arrow" for each in inside):
        return _saved_names(path, name)
    result = [each for each in inside if _is_data(path / each) and not each.startswith((".", "_"))]
    files = [each for each in result if (path / each).is_file()]
    if not files:
        has_folders = any((path / each).is_dir() for each in inside)
        hint = f"Files of the folders in it: {os.path.join(name, '**', '*.jsonl')}." if has_folders else None
        raise DataError(f"is a directory without data files ({_accepted()}).", where=name, hint=hint)
    return files


def _saved_names(path: Path, name: str) -> list[str]:
    """The names of the arrow files of a folder that `save_to_disk` wrote, in order."""
    try:
        named = [str(each["filename"]) for each in json.loads((path / SAVED_STATE).read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"its {SAVED_STATE} does not list its files.", where=name) from None
    if not named:
        raise DataError("has no rows.", where=name)
    missing = next((each for each in named if Path(each).name != each or not (path / each).is_file()), None)
    if missing is not None:
        raise DataError(f"{missing}, which its {SAVED_STATE} names, is not there.", where=name)
    return named


def _matching_names(name: str, base_dir: Path) -> list[str]:
    """The names of the files that match a pattern, sorted."""
    pattern = os.path.expanduser(name)
    result = [each for each in glob.glob(pattern, root_dir=base_dir, recursive=True) if (base_dir / each).is_file()]
    if not result:
        is_elsewhere = not os.path.isabs(pattern) and base_dir.absolute() != Path.cwd()
        hint = f"Patterns are relative to {base_dir}." if is_elsewhere else None
        raise DataError("no file matches.", where=name, hint=hint)
    return sorted(result)


def _no_such_file(name: str, path: Path, base_dir: Path) -> DataError:
    if "://" in name:
        problem = "is a URL; download it and name the file, or name a Hub data set (owner/name)."
        return DataError(problem, where=name)
    return DataError("there is no such file.", where=name, hint=_likely_path(name, path, base_dir))


def _likely_path(name: str, path: Path, base_dir: Path) -> str | None:
    """A likely path of a file that does not exist where it was named."""
    # Without the suffixes, which are alike whatever the names are.
    files = {Path(each).stem: each for each in _names_in(path.parent) if _is_data(Path(each))}
    guess = closest(path.stem, list(files))
    if guess is not None:
        return f"Did you mean {Path(name).parent / files[guess]}?"
    is_elsewhere = not os.path.isabs(name) and base_dir.absolute() != Path.cwd()
    return f"Paths are relative to {base_dir}." if is_elsewhere else None


def _names_in(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
