"""Reads rows from files of the kinds in `READERS`, or from a data set of the Hugging Face Hub.

Names of the Hub are `owner/name`, `owner/name:split` or `owner/name:config:split`.

Every row has its location (`train.jsonl line 17`), so that later errors can name it.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.data.json_rows import read_json, read_jsonl
from weft.data.row import OPENERS, Row, is_compressed, kind_of
from weft.data.table_rows import read_arrow, read_parquet, read_table, read_txt
from weft.errors import DataError, closest, first_line, needs_extra

HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"((:(?P<config>[\w.+-]+))?:(?P<split>([\w.+-]|\[[\w:%+-]*\])+))?"
)
NO_CONFIG = "Config name is missing"
"""Message of `datasets` for a data set with several configurations."""


def read_hub(source: str, max_rows: int | None = None) -> Iterator[Row]:
    """The rows of a data set; if only the first are needed, they are streamed and the rest is not downloaded."""
    match = HUB_NAME.fullmatch(source)
    assert match is not None
    with needs_extra("hub", "there is no such file, and reading a Hugging Face data set needs datasets.", source):
        import datasets
    name, split = match["name"], match["split"] or "train"
    try:
        result = datasets.load_dataset(name, match["config"], split=split, streaming=max_rows is not None)
        for number, row in enumerate(result, 1):
            yield Row(row, f"{source} row {number}")
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
        if NO_CONFIG in str(error):
            raise _no_config(source, name, split, str(error)) from None
        raise DataError(
            f"is neither a file nor a Hub data set that can be read now ({first_line(error)}); check the name, the "
            "split and the connection.",
            where=source,
        ) from None


def _no_config(source: str, name: str, split: str, message: str) -> DataError:
    listed = re.search(r"\[([^\]]*)\]", message)
    configs = re.findall(r"'([^']*)'", listed[1]) if listed else []
    which = f" ({', '.join(configs)})" if configs else ""
    example = f"{name}:{configs[0] if configs else 'CONFIG'}:{split}"
    return DataError(f"has several configurations{which}; name one before the split, such as {example}.", where=source)


@dataclass(frozen=True)
class DataFile:
    name: str
    """Name as the user wrote it; for a file of a folder, followed by its own name."""
    path: Path
    has_header: bool = True
    """False for a table whose columns are named by their numbers, from 1."""

    @property
    def kind(self) -> str:
        """The suffix that decides how its rows are read."""
        return kind_of(self.path)

    @property
    def is_lines(self) -> bool:
        return self.kind in JSON_LINES

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def num_text_bytes(self) -> int:
        return self.num_bytes * (TEXT_PER_COMPRESSED if is_compressed(self.path) else 1)

    def rows(self) -> Iterator[Row]:
        with self.read_errors():
            if self.kind in TABLES:
                yield from read_table(self.path, self.name, has_header=self.has_header)
            else:
                yield from READERS[self.kind](self.path, self.name)

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Turns errors of the operating system and of decompression inside the block into one sentence."""
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            result = (isinstance(error, OSError) and error.strerror) or str(error)
            raise DataError(f"cannot be read ({result}).", where=self.name) from None


@dataclass(frozen=True)
class Source:
    """A data source that a user named: consecutive files, or a data set of the Hub."""

    name: str
    files: tuple[DataFile, ...]
    max_rows: int | None = None

    @property
    def is_on_hub(self) -> bool:
        return not self.files

    @property
    def is_lines(self) -> bool:
        return not self.is_on_hub and all(file.is_lines for file in self.files)

    def rows(self) -> Iterator[Row]:
        """The rows one by one; a source without any is a DataError."""
        is_empty = True
        of_files = itertools.chain.from_iterable(file.rows() for file in self.files)
        every = read_hub(self.name, self.max_rows) if self.is_on_hub else of_files
        for row in itertools.islice(every, self.max_rows):
            is_empty = False
            yield row
        if is_empty:
            raise self.no_rows()

    def no_rows(self) -> DataError:
        return DataError("has no rows.", where=self.name)


TEXT_PER_COMPRESSED = 4
TABLES = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
READERS: dict[str, Callable[[Path, str], Iterable[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_txt,
}
BINARY = (".parquet", ".arrow")
"""Files that are compressed inside, if at all."""


SAVED_STATE, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a data set, and into a folder of several."""


def find_source(name: str, base_dir: Path, *, has_header: bool = True, max_rows: int | None = None) -> Source:
    """The files, or the Hub data set, of a name; a DataError if there is nothing to read. A relative path is relative
    to `base_dir`; errors name the source as the user wrote it."""
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
    return glob.has_magic(name) and HUB_NAME.fullmatch(name) is None


def read_rows(source: str, base_dir: Path, *, has_header: bool = True) -> list[Row]:
    return list(find_source(source, base_dir, has_header=has_header).rows())


def _check(file: DataFile) -> None:
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
    if os.path.islink(path):
        return DataError(f"is a link to {os.readlink(path)}, which does not exist.", where=name)
    return DataError("there is no such file.", where=name, hint=_likely_path(name, path, base_dir))


def _likely_path(name: str, path: Path, base_dir: Path) -> str | None:
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
