from __future__ import annotations

import csv
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import assert_rows_or_data_error

from weft.data.sources import find_source, read_rows
from weft.errors import DataError, MissingExtraError

Write = Callable[..., str]


def error_of(name: str, directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(name, directory)
    return str(caught.value)


def test_source_when_path_is_relative_then_is_found_in_the_base_directory(write: Write, tmp_path: Path):
    write("a.jsonl", '{"text": "a"}\n')
    assert read_rows("a.jsonl", tmp_path)[0].where == "a.jsonl line 1"
    assert read_rows(str(tmp_path / "a.jsonl"), Path("/"))[0].values == {"text": "a"}


def test_source_when_file_is_missing_then_reports_it(tmp_path: Path):
    where = f"Paths are relative to {tmp_path}."
    assert error_of("data/train.jsonl", tmp_path) == f"data/train.jsonl: there is no such file. {where}"
    assert error_of("train", tmp_path) == f"train: there is no such file. {where}"
    assert error_of("x" * 5000, tmp_path).endswith(f"there is no such file. {where}")
    assert error_of(str(tmp_path / "train.jsonl"), tmp_path) == f"{tmp_path}/train.jsonl: there is no such file."


def test_source_when_a_file_has_nearly_that_name_then_it_is_suggested(write: Write, tmp_path: Path):
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "train.docx", "eval.jsonl"):
        write(f"data/{name}", "{}")
    assert error_of("data/trains.jsonl", tmp_path).endswith("there is no such file. Did you mean data/train.jsonl?")
    assert error_of("data/train.csv", tmp_path).endswith("Did you mean data/train.jsonl?")
    assert "Did you mean" not in error_of("data/other.jsonl", tmp_path)


def test_source_when_it_is_a_link_to_nothing_then_reports_where_it_leads(tmp_path: Path):
    (tmp_path / "dangling.jsonl").symlink_to("gone.jsonl")
    assert error_of("dangling.jsonl", tmp_path) == "dangling.jsonl: is a link to gone.jsonl, which does not exist."


def test_source_when_suffix_is_unknown_then_names_the_accepted_ones(write: Write, tmp_path: Path):
    assert error_of(write("a.xml", "<a/>"), tmp_path).startswith("a.xml: has the suffix '.xml'; accepted are .jsonl,")
    assert error_of(write("plain", "a"), tmp_path).startswith("plain: has no suffix; accepted are .jsonl,")


def test_source_when_pipe_then_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert error_of("pipe.jsonl", tmp_path) == "pipe.jsonl: is not a regular file."


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_source_when_empty_then_has_no_rows(suffix: str, content: bytes, write: Write, tmp_path: Path):
    assert error_of(write(f"a.{suffix}", content), tmp_path) == f"a.{suffix}: has no rows."


def test_csv_when_cells_are_quoted_over_lines_then_rows_name_their_first_line(write: Write, tmp_path: Path):
    name = write("x.csv", b'\xef\xbb\xbfprompt, completion\r\n"a\r\nb",1\r\n\r\nc,"write ""hi"""\r\n')
    rows = read_rows(name, tmp_path)
    assert [row.values for row in rows] == [
        {"prompt": "a\r\nb", "completion": "1"},
        {"prompt": "c", "completion": 'write "hi"'},
    ]
    assert [row.where for row in rows] == ["x.csv line 2", "x.csv line 5"]


def test_tsv_when_read_then_is_split_at_tabs(write: Write, tmp_path: Path):
    assert read_rows(write("x.tsv", "prompt\tcompletion\na,b\tc\n"), tmp_path)[0].values == {
        "prompt": "a,b",
        "completion": "c",
    }


def test_csv_when_a_cell_is_large_then_it_is_read_and_the_limit_of_the_module_is_put_back(write: Write, tmp_path: Path):
    csv.field_size_limit(100_000)
    rows = read_rows(write("x.csv", "text\n" + "a" * 200_000), tmp_path)
    assert len(rows[0].values["text"]) == 200_000
    assert csv.field_size_limit(131_072) == 100_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a,b\n1,2\n1,2,3\n", "x.csv line 3: has 3 cells; the header has 2."),
        ("a,b\n1\n", "x.csv line 2: has 1 cell; the header has 2."),
        ("a,a\n1,2\n", "x.csv line 1: two columns are named 'a'."),
        ('a,b\n1,"2\n', "x.csv line 2: is not a valid table: unexpected end of data."),
        ("a,b\n", "x.csv: has no rows."),
    ],
)
def test_csv_when_it_is_wrong_then_the_error_names_the_line(text: str, found: str, write: Write, tmp_path: Path):
    assert error_of(write("x.csv", text), tmp_path) == found


def test_text_file_when_not_utf8_then_names_the_line(write: Write, tmp_path: Path):
    assert error_of(write("x.csv", b"a\nb\n\xe9t\xe9\n"), tmp_path).startswith(
        "x.csv line 3: the byte 0xe9 is not UTF-8"
    )
    assert error_of(write("x.txt", "a\nb".encode("utf-16-le")), tmp_path).startswith("x.txt line 1: has a NUL byte")


def test_txt_when_it_has_blank_lines_then_paragraphs_are_rows(write: Write, tmp_path: Path):
    rows = read_rows(write("x.txt", "\none\r\ntwo\r\n\r\n \nthree\n"), tmp_path)
    assert [(row.where, row.values["text"]) for row in rows] == [
        ("x.txt line 2", "one\ntwo"),
        ("x.txt line 6", "three"),
    ]


def test_txt_when_it_has_no_blank_line_then_lines_are_rows(write: Write, tmp_path: Path):
    rows = read_rows(write("x.txt", "one\ntwo\n\n"), tmp_path)
    assert [(row.where, row.values["text"]) for row in rows] == [("x.txt line 1", "one"), ("x.txt line 2", "two")]


def test_parquet_when_read_then_rows_keep_lists_and_objects(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    read = read_rows("x.parquet", tmp_path)
    assert read[0].where == "x.parquet row 1"
    assert read[0].values["messages"][1] == {"role": "assistant", "content": "b", "weight": 1}


def test_arrow_files_when_two_columns_have_one_name_then_are_refused(tmp_path: Path):
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "completion", "prompt"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        assert error_of(name, tmp_path) == f"{name}: two columns are named 'prompt'."


def test_parquet_when_damaged_then_reports_it(write: Write, tmp_path: Path):
    assert error_of(write("x.parquet", b"PAR1 not really"), tmp_path).startswith("x.parquet: is not a parquet file")


def test_parquet_when_pyarrow_is_missing_then_names_the_extra(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[parquet\]'"):
        read_rows(write("x.parquet", b"PAR1"), tmp_path)


def test_hub_name_when_datasets_is_missing_then_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[hub\]'"):
        read_rows("openai/gsm8k", tmp_path)


class FakeHub(types.ModuleType):
    """Stands in for the `datasets` package, which needs a network."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.requests: list[tuple[str, str | None, str, bool]] = []
        self.num_read = 0
        self.exceptions = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        self.requests.append((name, config, split, streaming))
        if name == "owner/configs" and config is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'other']")
        if name == "owner/offline":
            raise ConnectionError("Couldn't reach the Hub.\nmore")
        if name == "owner/broken":
            raise self.exceptions.DatasetsError("bad files")
        for number in itertools.count():
            self.num_read += 1
            if number == 2 and not streaming:
                return
            yield {"text": str(number)}


def test_hub_name_when_datasets_is_there_then_rows_come_from_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [row.where for row in read_rows("owner/name:test", tmp_path)] == [
        "owner/name:test row 1",
        "owner/name:test row 2",
    ]
    for name in ("owner/name", "owner/name:en.1:test[:10%]", "owner/name:train[:5]+test[5:]"):
        read_rows(name, tmp_path)
    assert [(config, split) for _, config, split, _ in hub.requests] == [
        (None, "test"),
        (None, "train"),
        ("en.1", "test[:10%]"),
        (None, "train[:5]+test[5:]"),
    ]


def test_hub_name_when_only_some_rows_are_wanted_then_they_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A data set that never ends is read only as far as needed."""
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    rows = list(find_source("owner/endless", tmp_path, max_rows=3).rows())
    assert [row.values["text"] for row in rows] == ["0", "1", "2"]
    assert hub.num_read == 3 and hub.requests[0][3]


def test_hub_name_when_a_configuration_has_to_be_named_then_names_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub())
    assert error_of("owner/configs:test", tmp_path) == (
        "owner/configs:test: has several configurations (main, other); name one before the split, such as "
        "owner/configs:main:test."
    )
    assert len(read_rows("owner/configs:main:test", tmp_path)) == 2


def test_hub_name_when_the_hub_fails_then_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub())
    assert error_of("owner/offline", tmp_path) == (
        "owner/offline: is neither a file nor a Hub data set that can be read now (Couldn't reach the Hub); "
        "check the name, the split and the connection."
    )
    assert "(bad files)" in error_of("owner/broken", tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(st.binary(max_size=120), st.text('ab",\n\r\t', max_size=60).map(str.encode)),
    suffix=st.sampled_from([".csv", ".tsv", ".txt"]),
)
def test_any_bytes_when_read_as_a_table_or_text_then_are_rows_or_a_data_error(data: bytes, suffix: str, tmp_path: Path):
    assert_rows_or_data_error(tmp_path / f"any{suffix}", data)


def test_csv_when_a_later_line_is_broken_then_the_rows_before_it_come_first(write: Write, tmp_path: Path):
    """Tables are read as far as rows are needed, however large they are."""
    rows = find_source(write("x.csv", b"text\n1\n2\n\xff\n"), tmp_path).rows()
    assert [next(rows).values["text"] for _ in range(2)] == ["1", "2"]
    with pytest.raises(DataError, match=r"^x.csv line 4: the byte 0xff is not UTF-8"):
        next(rows)
