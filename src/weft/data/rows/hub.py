"""Reads data sets of the Hugging Face Hub: `owner/name`, `owner/name:split` or `owner/name:config:split`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weft.data.rows.row import Row
from weft.errors import DataError, MissingExtraError, first_line, install_command

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
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(
            "there is no such file, and reading a Hugging Face data set needs datasets.",
            where=source,
            hint=f"Install it: {install_command('hub')}.",
        ) from None
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
