"""Uploads: whatever the name and the bytes, either a file under our own name or a 400 and nothing stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from service_home import Home, chat_lines, make_home

from weft.serve.api.stored_files import clean_name
from weft.serve.db import files
from weft.serve.db.tables import FILES
from weft.serve.errors import Unsure
from weft.store import faults

LINE = b'{"text": "a"}\n'
NAMES = [
    "train.jsonl",
    "../../etc/passwd",
    "..",
    ".",
    "...",
    "",
    " ",
    "/etc/passwd",
    "//host/share",
    "C:\\Windows\\system32\\cmd.exe",
    "..\\..\\x.jsonl",
    "a/b/c.jsonl",
    "~/.ssh/id_rsa",
    "file:///etc/passwd",
    "http://169.254.169.254/latest",
    "CON",
    "NUL.jsonl",
    "a" * 300,
    "a" * 300 + ".jsonl",
    "\u202egnp.exe.jsonl",
    "\u200b",
    "\u0301\u0301",
    "ünïcödé.jsonl",
    "日本語.jsonl",
    "\U0001f600.jsonl",
    "tab\there.jsonl",
    "new\nline.jsonl",
    "carriage\rreturn",
    'quote".jsonl',
    "semi;colon=1.jsonl",
    "per%2e%2e%2fcent",
    "<script>alert(1)</script>",
    "$(rm -rf ~)",
    "`id`",
    "| cat",
    "a\x00b.jsonl",
    "-rf",
    "--help",
    ".hidden",
    "trailing.",
    "blob/../../x",
    "ends with space ",
]


def body(name: bytes, data: bytes = LINE) -> bytes:
    head = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--B\r\n'
    return (
        head
        + b'Content-Disposition: form-data; name="file"; filename="'
        + name
        + b'"\r\n\r\n'
        + data
        + b"\r\n--B--\r\n"
    )


FORM = {"content-type": "multipart/form-data; boundary=B"}


@pytest.mark.parametrize("name", NAMES)
def test_name_when_strange_then_a_label_and_never_a_path(home: Home, name: str, tmp_path: Path):
    before = sorted(p for p in tmp_path.rglob("*") if "blobs" not in p.parts)
    answer = home.call("POST", "/v1/files", files={"file": (name, LINE)}, data={"purpose": "fine-tune"})
    if answer.status_code == 400:
        # An encoder may leave the name out, and then there is no file in the form.
        assert name.strip() == ""
        return
    assert answer.status_code == 200, answer.text
    shown = answer.json()["filename"]
    assert 0 < len(shown) <= 255
    assert not set(shown) & set("/\\\0\r\n\t\u202e\u200b")
    assert shown not in (".", "..", "...")
    assert sorted(p for p in tmp_path.rglob("*") if "blobs" not in p.parts) == before
    (row,) = home.sdk().files.list().data
    content = home.call("GET", f"/v1/files/{row.id}/content")
    assert content.content == LINE
    assert content.headers["content-disposition"].isascii()


@pytest.mark.parametrize("name", [b"a\x00b", b"\xff\xfe", b"\xed\xa0\x80", b"..", b'a\\"b'])
def test_name_when_raw_bytes_then_taken_or_refused_but_never_a_5xx(home: Home, name: bytes):
    answer = home.call("POST", "/v1/files", content=body(name), headers=FORM)
    assert answer.status_code in (200, 400)


def test_names_when_counted_then_are_forty():
    assert len(set(NAMES)) >= 40
    assert clean_name("a/../..") == "upload"


@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 413)])
def test_file_when_at_the_cap_then_taken_and_beyond_it_refused(tmp_path: Path, extra: int, status: int):
    home = make_home(tmp_path, limits={"file_bytes": 1000})
    data = LINE * 70 + b"\n" * (1000 + extra - len(LINE * 70))
    with home.http:
        answer = home.call("POST", "/v1/files", files={"file": ("a", data)}, data={"purpose": "fine-tune"})
        assert answer.status_code == status
        assert home.num_blobs() == (1 if status == 200 else 0)
        assert home.count(FILES) == (1 if status == 200 else 0)
        if status == 413:
            assert answer.json()["error"]["param"] == "file"
    home.database.close()


@pytest.mark.parametrize(("extra", "is_good"), [(-1, True), (0, True), (1, False)])
def test_line_when_at_the_cap_then_taken_and_beyond_it_refused(tmp_path: Path, extra: int, is_good: bool):
    home = make_home(tmp_path, limits={"line_bytes": 500})
    frame = len(b'{"text": ""}')
    data = LINE + b'{"text": "' + b"x" * (500 + extra - frame) + b'"}\n'
    with home.http:
        answer = home.call("POST", "/v1/files", files={"file": ("a", data)}, data={"purpose": "fine-tune"})
        assert (answer.status_code == 200) == is_good
        if not is_good:
            assert "line 2: is longer than 500 bytes" in answer.json()["error"]["message"]
            assert home.num_blobs() == 0
    home.database.close()


@pytest.mark.parametrize(("depth", "is_good"), [(63, True), (64, True), (65, False), (10**6, False)])
def test_nesting_when_at_the_cap_then_taken_and_beyond_it_refused(tmp_path: Path, depth: int, is_good: bool):
    home = make_home(tmp_path, limits={"file_bytes": 4_000_000, "line_bytes": 3_000_000})
    data = b'{"text": "a", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}\n"
    with home.http:
        answer = home.call("POST", "/v1/files", files={"file": ("a", data)}, data={"purpose": "fine-tune"})
        assert (answer.status_code == 200) == is_good, answer.text
        if not is_good:
            assert answer.status_code == 400
            assert "line 1: is nested" in answer.json()["error"]["message"]
    home.database.close()


BAD_FILES = {
    "empty": (b"", "is empty"),
    "blank lines": (b"\n\n \n", "has 0 samples"),
    "not json": (b'{"a": hello}\n', "line 1: is not valid JSON"),
    "cut": (LINE + b'{"text": "a', "line 2: is not valid JSON: it ends in the middle"),
    "list": (b'[{"text": "a"}]', "one object per line"),
    "number": (LINE + b"17\n", "line 2: is 17"),
    "nan": (b'{"text": NaN}\n', "NaN is not valid JSON"),
    "twice": (b'{"a": 1, "a": 2}\n', "appears twice"),
    "surrogate": (b'{"text": "\\ud800"}\n', "surrogate"),
    "latin-1": (LINE + b'{"text": "\xe9"}\n', "line 2: the byte 0xe9 is not UTF-8"),
    "nul": (b'{"text": "\0"}\n', "NUL"),
    "utf-16": (LINE.decode().encode("utf-16"), "NUL byte"),
    "digits": (b'{"a": ' + b"9" * 10_000 + b"}\n", "too many digits"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\x99" * 20, "line 1"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_file_when_bad_then_400_with_its_line_and_nothing_is_stored(home: Home, kind: str):
    data, expected = BAD_FILES[kind]
    with pytest.raises(openai.BadRequestError) as refused:
        home.sdk().files.create(file=("t.jsonl", data), purpose="fine-tune")
    assert refused.value.param == "file"
    assert expected in refused.value.message
    assert (home.num_blobs(), home.count(FILES)) == (0, 0)


def test_file_when_it_is_unknown_whether_its_row_is_there_then_its_bytes_stay(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    """A row whose commit was not confirmed may name them; if none does, the daily clean-up deletes them."""

    def unsure(*_: Any, **__: Any) -> None:
        raise Unsure("the connection to the database was lost while it wrote; look before trying again.")

    monkeypatch.setattr(files, "create_file", unsure)
    with pytest.raises(openai.APIStatusError) as refused:
        home.sdk(max_retries=0).files.create(file=("t.jsonl", LINE * 12), purpose="fine-tune")
    assert refused.value.status_code == 503
    assert home.num_blobs() == 1


BAD_ROWS = {
    "role": ('{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role is 'robot'"),
    "no answer": ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
    "unknown": ('{"foo": 1}', "has the columns foo"),
    "dpo": ('{"chosen": "a", "rejected": "b", "prompt": "c"}', "is preference data, for the method dpo."),
    "mixed": ('{"text": "a"}', "is in the text format"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_job_when_a_row_is_bad_then_400_names_the_line_and_nothing_is_made(home: Home, kind: str):
    row, expected = BAD_ROWS[kind]
    file = home.upload(data=chat_lines(2) + row.encode() + b"\n")
    with pytest.raises(openai.BadRequestError) as refused:
        home.job(file=file)
    assert refused.value.param == "training_file"
    assert "train.jsonl line 3: " in refused.value.message
    assert expected in refused.value.message
    assert refused.value.body["problems"][0]["line"] == 3
    assert home.sdk().fine_tuning.jobs.list().data == []


def test_job_when_the_validation_file_is_bad_then_its_name_is_the_param(home: Home):
    with pytest.raises(openai.BadRequestError) as refused:
        home.job(validation_file=home.upload(data=b'{"foo": 1}\n'))
    assert refused.value.param == "validation_file"


def test_problems_when_many_then_the_first_twenty_are_listed(home: Home):
    with pytest.raises(openai.BadRequestError) as refused:
        home.sdk().files.create(file=("t.jsonl", b"x\n" * 100), purpose="fine-tune")
    assert [p["line"] for p in refused.value.body["problems"]] == list(range(1, 21))


def test_samples_when_fewer_than_the_operator_requires_then_refused(tmp_path: Path):
    home = make_home(tmp_path, limits={"min_samples": 10})
    with home.http:
        home.upload(data=chat_lines(10))
        with pytest.raises(openai.BadRequestError, match="has 9 samples; at least 10"):
            home.upload(data=chat_lines(9))
    home.database.close()


FORMS = {
    "no boundary": (b"x", {"content-type": "multipart/form-data"}),
    "json": (b"{}", {"content-type": "application/json"}),
    "no file": (b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--B--\r\n', FORM),
    "cut": (body(b"a")[:-20], FORM),
    "cut in the head": (body(b"a")[:30], FORM),
    "garbage": (b"\x00\x01\x02" * 100, FORM),
    "nothing": (b"", FORM),
    "two files": (body(b"a")[:-7] + b"\n" + body(b"b"), FORM),
    "long field": (body(b"a").replace(b"fine-tune", b"x" * 10_000), FORM),
    "many parts": (b'--B\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n' * 100 + b"--B--\r\n", FORM),
    "other purpose": (body(b"a").replace(b"fine-tune", b"assistants"), FORM),
}


@pytest.mark.parametrize("kind", FORMS)
def test_form_when_bad_then_400_and_nothing_is_stored(home: Home, kind: str):
    data, headers = FORMS[kind]
    answer = home.call("POST", "/v1/files", content=data, headers=headers)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    assert (home.num_blobs(), home.count(FILES)) == (0, 0)


@pytest.mark.parametrize("seconds", ["3599", "2592001", "x", "-1", "1e9", ""])
def test_expiry_when_out_of_range_then_400(home: Home, seconds: str):
    fields = {"purpose": "fine-tune", "expires_after[seconds]": seconds}
    answer = home.call("POST", "/v1/files", files={"file": ("a", LINE)}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after.seconds")


def test_storage_when_used_up_then_429_with_the_arithmetic(home: Home):
    home.limit("acme", max_stored_bytes=30)
    home.upload(data=LINE * 2)
    with pytest.raises(
        openai.RateLimitError, match="28 bytes are stored and this file would pass the limit of 30"
    ) as refused:
        home.upload(data=LINE)
    assert refused.value.code == "quota_exceeded"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert home.num_blobs() == 1
    home.upload("globex", data=LINE)


def test_disk_when_nearly_full_then_uploads_are_refused(tmp_path: Path):
    home = make_home(tmp_path, limits={"disk_floor_bytes": 2**62})
    with home.http:
        answer = home.call("POST", "/v1/files", files={"file": ("a", LINE)}, data={"purpose": "fine-tune"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    home.database.close()


@pytest.mark.parametrize("at", range(1, 5))
def test_disk_when_it_fills_during_an_upload_then_503_and_nothing_is_left(home: Home, at: int):
    faults.arm(faults.parse(f"enospc@{at}"))
    try:
        answer = home.call("POST", "/v1/files", content=body(b"a"), headers=FORM)
    finally:
        faults.disarm()
    assert answer.status_code == (503 if at <= 3 else 200), answer.text
    assert (home.num_blobs(), home.count(FILES)) == ((0, 0) if at <= 3 else (1, 1))


def test_client_when_gone_in_the_middle_of_an_upload_then_nothing_is_left(home: Home, caplog: pytest.LogCaptureFixture):
    part = body(b"a", LINE * 50)[:400]
    sent = [{"type": "http.request", "body": part, "more_body": True}, {"type": "http.disconnect"}]
    headers = [(name.encode(), value.encode()) for name, value in {**home.headers(), **FORM}.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b""}
    scope |= {"headers": headers, "server": ("testserver", 80), "client": ("c", 1), "scheme": "http", "root_path": ""}

    async def receive() -> dict[str, Any]:
        return sent.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pass

    anyio.run(home.app, {**scope, "app": home.app}, receive, send)
    assert sent == []
    assert (home.num_blobs(), home.count(FILES)) == (0, 0)
    assert "a request failed" not in caplog.text


def test_content_length_when_it_lies_then_the_bytes_count(home: Home):
    data = body(b"a", LINE * 9000)
    answer = home.call("POST", "/v1/files", content=iter([data]), headers={**FORM, "content-length": "10"})
    assert answer.status_code in (400, 413)
    assert home.num_blobs() == 0


def test_files_when_deleted_while_a_job_needs_them_then_the_bytes_stay_until_it_ended(home: Home):
    file = home.upload()
    home.job(file=file)
    assert home.sdk().files.delete(file).deleted
    assert home.num_blobs() == 1
    assert json.loads(home.call("GET", f"/v1/files/{file}").text)["error"]["param"] == "file_id"


def test_upload_when_it_is_a_table_then_reports_what_a_training_file_is(home: Home):
    with pytest.raises(openai.BadRequestError, match=r"a\.csv line 1: is 'prompt,completion'; each line is a JSON obj"):
        home.upload(data=b"prompt,completion\na,b\n", name="a.csv")
