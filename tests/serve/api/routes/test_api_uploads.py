"""Uploads in parts: what is completed is the file, byte for byte; after any error nothing is left."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from service_home import Home, chat_lines, make_home

from weft.serve.api import file_routes as routes
from weft.serve.db.files import delete_unnamed_blobs
from weft.serve.db.tables import FILES, UPLOAD_PARTS, UPLOADS
from weft.store import faults

DATA = chat_lines(40)


def announce(home: Home, size: int = len(DATA), **fields: Any) -> str:
    options = {"filename": "../long.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune", **fields}
    return home.sdk().uploads.create(bytes=size, **options).id


def send(home: Home, upload: str, data: bytes) -> str:
    return home.sdk().uploads.parts.create(upload, data=data).id


def test_upload_when_the_sdk_sends_a_long_file_then_it_is_a_file_like_any_other(home: Home, tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(DATA)
    digest = hashlib.md5(DATA).hexdigest()
    done = home.sdk().uploads.upload_file_chunked(
        file=path, mime_type="text/jsonl", purpose="fine-tune", part_size=700, md5=digest
    )
    assert (done.object, done.status, done.bytes, done.filename) == ("upload", "completed", len(DATA), "train.jsonl")
    assert done.file is not None and done.file.status == "processed"
    assert home.sdk().files.content(done.file.id).read() == DATA
    assert [file.id for file in home.sdk().files.list()] == [done.file.id]
    assert home.count(UPLOAD_PARTS) > 2
    assert home.num_blobs() == 1, "the parts are gone"
    home.job(file=done.file.id)


def test_parts_when_named_in_another_order_then_that_is_the_file(home: Home):
    upload = announce(home, expires_after={"anchor": "created_at", "seconds": 3600})
    second, first = send(home, upload, DATA[500:]), send(home, upload, DATA[:500])
    done = home.sdk().uploads.complete(upload, part_ids=[first, second])
    assert done.file is not None and home.sdk().files.content(done.file.id).read() == DATA
    assert done.file.filename == "long.jsonl"
    assert done.file.to_dict()["expires_at"] == done.file.created_at + 3600
    again = home.sdk().uploads.complete(upload, part_ids=[first, second])
    assert again.file is not None and again.file.id == done.file.id
    assert (home.count(FILES), home.num_blobs()) == (1, 1)
    with pytest.raises(openai.BadRequestError, match="delete its file"):
        home.sdk().uploads.cancel(upload)


def test_complete_when_many_request_it_at_once_then_one_file(home: Home):
    upload = announce(home)
    part = send(home, upload, DATA)
    answers: list[Any] = []

    def complete() -> None:
        answers.append(home.call("POST", f"/v1/uploads/{upload}/complete", json={"part_ids": [part]}))

    threads = [threading.Thread(target=complete) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["file"]["id"] for answer in answers}) == 1
    assert (home.count(FILES), home.num_blobs()) == (1, 1)


@pytest.mark.parametrize("has_read", [True, False])
def test_complete_when_another_was_quicker_then_its_file_is_the_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch, has_read: bool
):
    """Quicker than the end of this request, or than its reading of the parts, which are gone then."""
    upload = announce(home)
    part = send(home, upload, DATA)
    join = routes._join
    quicker: list[Any] = []

    def slow(*arguments: Any) -> str:
        digest = join(*arguments) if has_read else ""
        monkeypatch.setattr(routes, "_join", join)
        quicker.append(home.sdk().uploads.complete(upload, part_ids=[part]))
        return digest or join(*arguments)

    monkeypatch.setattr(routes, "_join", slow)
    assert home.sdk().uploads.complete(upload, part_ids=[part]).file == quicker[0].file
    assert (home.count(FILES), home.num_blobs()) == (1, 1)


WRONG: dict[str, tuple[Any, str]] = {
    "none": ([], "part_ids"),
    "unknown": (["part_none"], "part_ids"),
    "some": (["{a}"], "part_ids"),
    "twice": (["{a}", "{a}"], "part_ids"),
    "md5": (["{a}", "{b}"], "md5"),
    "text": ("{a}", "part_ids"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_complete_when_it_does_not_add_up_then_refused_and_still_open(home: Home, kind: str):
    upload = announce(home, 100)
    ids = {"a": send(home, upload, b"\n" * 50), "b": send(home, upload, b"\n" * 50)}
    requested, param = WRONG[kind]
    parts = requested.format(**ids) if isinstance(requested, str) else [id.format(**ids) for id in requested]
    answer = home.call("POST", f"/v1/uploads/{upload}/complete", json={"part_ids": parts, "md5": "0" * 32})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param
    assert (home.count(FILES), home.num_blobs()) == (0, 2)


def test_complete_when_a_line_is_bad_then_400_names_it_and_no_file_is_made(home: Home):
    upload = announce(home, len(DATA) + 4)
    parts = [send(home, upload, DATA), send(home, upload, b"oops")]
    with pytest.raises(openai.BadRequestError) as refused:
        home.sdk().uploads.complete(upload, part_ids=parts)
    assert refused.value.body["problems"][0]["line"] == 41
    assert (home.count(FILES), home.num_blobs()) == (0, 2)


def test_upload_when_cancelled_then_takes_nothing_more_and_the_parts_are_gone(home: Home):
    upload = announce(home)
    part = send(home, upload, DATA)
    for _ in range(2):
        assert home.sdk().uploads.cancel(upload).status == "cancelled"
    assert home.num_blobs() == 0
    for call in (
        lambda: send(home, upload, b"x"),
        lambda: home.sdk().uploads.complete(upload, part_ids=[part]),
    ):
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            call()


def test_upload_when_left_alone_for_an_hour_then_expired_and_tidied(home: Home):
    upload = announce(home)
    send(home, upload, DATA)
    with home.database.begin() as tx:
        tx.execute(sa.update(UPLOADS).values(expires_at=UPLOADS.c.expires_at - 3600))
    with pytest.raises(openai.BadRequestError, match="is expired"):
        send(home, upload, b"x")
    assert home.sdk().uploads.cancel(upload).status == "expired"
    assert delete_unnamed_blobs(home.database, home.blobs, older_than_s=-10) == 0, "cancelling took the parts away"
    upload = announce(home)
    send(home, upload, DATA)
    assert delete_unnamed_blobs(home.database, home.blobs, older_than_s=-10) == 1


def test_upload_when_too_long_then_refused_before_and_while_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = make_home(tmp_path, limits={"file_bytes": 1000})
    monkeypatch.setattr(routes, "PART_BYTES", 400)
    with home.http:
        with pytest.raises(openai.APIStatusError, match="longer than 1,000") as refused:
            announce(home, 1001)
        assert refused.value.status_code == 413
        upload = announce(home, 1000)
        for size, most in ((401, 400), (400, None), (400, None), (201, 200), (200, None), (1, 0)):
            answer = home.call("POST", f"/v1/uploads/{upload}/parts", files={"data": b"\n" * size})
            assert answer.status_code == (200 if most is None else 413), answer.text
            if most is not None:
                assert f"longer than {most} bytes" in answer.json()["error"]["message"]
        assert home.num_blobs() == 3
        assert home.call("POST", f"/v1/uploads/{upload}/parts", files={"data": b""}).status_code == 400
    home.database.close()


def test_storage_when_announced_uploads_would_pass_the_quota_then_429(home: Home):
    home.limit("acme", max_stored_bytes=len(DATA) + 10)
    upload = announce(home)
    with pytest.raises(openai.RateLimitError, match=f"{len(DATA):,} bytes are stored and 11 more"):
        announce(home, 11)
    home.sdk().uploads.cancel(upload)
    assert announce(home, 11)


@pytest.mark.parametrize("at", range(1, 4))
def test_disk_when_it_fills_during_a_part_then_503_and_the_part_can_be_sent_again(home: Home, at: int):
    upload = announce(home)
    faults.arm(faults.parse(f"enospc@{at}"))
    try:
        answer = home.call("POST", f"/v1/uploads/{upload}/parts", files={"data": DATA})
    finally:
        faults.disarm()
    assert (answer.status_code, home.num_blobs()) == (503, 0)
    done = home.sdk().uploads.complete(upload, part_ids=[send(home, upload, DATA)])
    assert done.status == "completed"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no bytes": ({"bytes": 0}, "bytes"),
    "bytes as text": ({"bytes": "7"}, "bytes"),
    "purpose": ({"purpose": "assistants"}, "purpose"),
    "no name": ({"filename": ""}, "filename"),
    "expiry": ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    "unknown": ({"mode": 1}, "mode"),
}


@pytest.mark.parametrize("kind", BAD)
def test_create_when_a_field_is_bad_then_400_names_it(home: Home, kind: str):
    change, param = BAD[kind]
    body = {"bytes": 7, "filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", **change}
    answer = home.call("POST", "/v1/uploads", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert home.count(UPLOADS) == 0


def test_parts_when_too_many_then_refused(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "MAX_UPLOAD_PARTS", 2)
    upload = announce(home)
    for _ in range(2):
        send(home, upload, b"x")
    with pytest.raises(openai.BadRequestError, match="has 2 parts"):
        send(home, upload, b"x")
