"""Zip archives as the file store keeps them: some files in one blob, without directories and without times."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO

from weft.errors import AdapterFileError
from weft.store.atomic import storage_errors

COPIED_BYTES = 2**20


def pack(stream: IO[bytes], paths: Iterable[Path]) -> None:
    """Writes files into an archive, each under its own name; equal files make equal archives."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            entry = zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, COPIED_BYTES)


def unpack(archive: Path, place: Path, names: Collection[str]) -> None:
    """Unpacks the files of these names from an archive, and nothing else that may be in it."""
    try:
        with storage_errors(place), zipfile.ZipFile(archive) as packed:
            for name in set(packed.namelist()) & set(names):
                with packed.open(name) as source, (place / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise AdapterFileError(f"is not an archive ({error}).", where=str(archive)) from None
