"""`weft serve` and `weft keys` as an operator meets them: real processes on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tiny_adapters import LEAVES, tiny_tensors
from verb_result import Weft

from weft.serve.supervise import WORKER_NICE
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

PATIENCE_S = 600.0
"""How long a test waits for what must happen; it matters only if it does not."""
SPEC = AdapterSpec(r=4, target_modules=tuple(LEAVES))
ROWS = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "HI"}]}\n' * 4


class Served:
    """A `weft serve` process."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.log = data_dir.parent / "log.txt"
        # The key is shown once, after everything else.
        last = "data" if data_dir.exists() else "key"
        command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--data-dir", str(data_dir), *options]
        self._stderr = self.log.open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        self.printed: dict[str, str] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, _, rest = line.partition(" ")
            self.printed.setdefault(name, rest.strip())
            if name == last:
                break

    def sdk(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.printed["serving"], api_key=key or self.printed.get("key", "none"), **options
        )

    def pids(self, num: int) -> list[int]:
        """The processes it has started, once there have been `num` of them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
            found = [line["pid"] for line in lines if "pid" in line]
            if len(found) >= num or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
        return code


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts services and sees that they end."""
    running: list[Served] = []

    def start(*options: str) -> Served:
        running.append(Served(tmp_path / "data", *options))
        return running[-1]

    yield start
    for one in running:
        if one.process.returncode is None:
            one.process.kill()
            one.stop()


def test_serve_when_started_first_then_shows_one_key_and_stops_on_a_signal(
    served: Callable[..., Served], weft: Weft, tmp_path: Path
):
    first = served("--workers", "0")
    key = first.printed["key"]
    with first.sdk() as client:
        file = client.files.create(file=("a.jsonl", ROWS), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
        assert job.status == "queued"
    assert first.stop() == 0
    second = served("--workers", "0")
    assert "key" not in second.printed
    with second.sdk(key) as client:
        assert client.fine_tuning.jobs.retrieve(job.id).status == "queued"
        other = weft("keys", "create", "--name", "ci", "--scopes", "files", "--data-dir", tmp_path / "data").out.strip()
        with second.sdk(other, max_retries=0) as limited:
            assert limited.files.retrieve(file.id).id == file.id
            with pytest.raises(openai.PermissionDeniedError):
                limited.fine_tuning.jobs.retrieve(job.id)
            assert weft("keys", "revoke", other, "--data-dir", tmp_path / "data").code == 0
            with pytest.raises(openai.AuthenticationError):
                limited.files.retrieve(file.id)
    assert second.stop(signal.SIGINT) == 0
    # Nowhere: neither in the logs nor in the database nor beside it.
    secrets = [text.split("_", 2)[2].encode() for text in (key, other)]
    files = [first.log, *(p for p in (tmp_path / "data").rglob("*") if p.is_file())]
    assert len(files) > 2
    for file in files:
        assert not any(secret in file.read_bytes() for secret in secrets), file


def test_serve_when_several_processes_answer_then_all_do_and_one_that_dies_comes_back(served: Callable[..., Served]):
    both = served("--workers", "0", "--api-processes", "2", "--no-auth")
    assert both.printed["key"].startswith("none needed")
    with both.sdk("x", max_retries=5) as client:
        file = client.files.create(file=("a.jsonl", ROWS), purpose="fine-tune")
        pids = both.pids(2)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(20):
            assert client.files.retrieve(file.id).id == file.id
        assert len(both.pids(3)) == 3
        # No job trains here, so nothing has to give way.
        assert os.getpriority(os.PRIO_PROCESS, pids[1]) == os.getpriority(os.PRIO_PROCESS, 0)
    assert both.stop() == 0


def test_serve_when_workers_train_beside_several_api_processes_then_the_workers_stand_back(
    served: Callable[..., Served],
):
    """A request comes before a training step."""
    service = served("--api-processes", "2", "--no-auth")
    worker, *apis = service.pids(3)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = time.monotonic() + PATIENCE_S
    while (found := os.getpriority(os.PRIO_PROCESS, worker)) != min(ours + WORKER_NICE, 19):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in apis] == [ours, ours]


def test_serve_when_it_only_answers_for_a_directory_of_adapters_then_all_of_them_can_be_tried(
    served: Callable[..., Served], tmp_path: Path
):
    (tmp_path / "lora" / "bad").mkdir(parents=True)
    for name, strength in (("mild", 0.05), ("wild", 0.4)):
        tensors = tiny_tensors(strength)
        write_adapter(tmp_path / "lora" / name, SPEC, tensors, base_model="tiny", target_names=LEAVES)
    (tmp_path / "lora" / "bad" / "adapter_config.json").write_text("{}")
    service = served("--no-training", "--adapters", str(tmp_path / "lora"))
    assert (service.printed["models"], service.printed["adapters"]) == ("tiny", "mild, wild")
    with service.sdk(max_retries=100) as client:
        prompt = {"prompt": "warp", "max_tokens": 6, "temperature": 0}
        texts = [client.completions.create(model=name, **prompt).choices[0].text for name in ("tiny", "mild", "wild")]
        assert len(set(texts)) > 1
        assert [model.id for model in client.models.list()] == ["tiny", "mild", "wild"]
        file = client.files.create(file=("a.jsonl", ROWS), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="--no-training"):
            client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    assert service.stop() == 0


def test_migrate_only_when_given_then_the_database_is_there_and_nothing_runs(weft: Weft, tmp_path: Path):
    done = weft("serve", "--migrate-only", "--data-dir", tmp_path / "data")
    assert done.out == "the database is at revision 0005\n"
    assert (tmp_path / "data" / "weft.db").exists()


def test_tenants_when_made_and_limited_then_shown(weft: Weft, tmp_path: Path):
    home = ("--data-dir", tmp_path)
    assert weft("keys", "tenants", "create", "acme", *home).code == 0
    shown = weft("keys", "tenants", "limits", "acme", "--max-active-jobs", "3", "--weight", "2", "--disable", *home)
    assert shown.out.split()[:6] == ["weight", "2.0", "max_priority", "0", "max_active_jobs", "3"]
    assert "disabled" in shown.out
    assert "none" in weft("keys", "tenants", "limits", "acme", "--max-active-jobs", "none", *home).out
    assert "acme" in weft("keys", "tenants", "list", *home).out
    key = weft("keys", "create", "--tenant", "acme", *home).out.strip()
    listed = weft("keys", "list", *home).out
    assert key.split("_")[1] in listed
    assert key.split("_", 2)[2] not in listed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--no-auth", "--host", "0.0.0.0"), "--no-auth: anybody who reaches 0.0.0.0"),
        (("serve", "--base-model", "a=x", "--base-model", "a=y"), "two backbones are called 'a'"),
        (("serve", "--base-model", "a:b=x"), "not a name for a backbone"),
        (
            ("serve", "--base-model", "gpt2"),
            "gpt2: there is no directory gpt2. Accepted are tiny, smollm2, a directory",
        ),
        (("serve", "--layout", "halves:2"), "--layout: got 'halves:2'; accepted are"),
        (("serve", "--layout", "stages:2", "--cluster", "local"), "--layout: is for workers of this machine"),
        (("serve", "--db", "mysql://x"), "mysql is not supported"),
        (("serve", "--db", "sqlite:////proc/x.db"), "--db sqlite:////proc/x.db: the file cannot be opened or made;"),
        (
            ("worker", "--db", "postgresql://a:secret@127.0.0.1:1/x"),
            "--db postgresql://a:***@127.0.0.1:1/x: the database cannot be reached at the moment",
        ),
        (("serve", "--store", "ftp://127.0.0.1:1/x"), "--store: 'ftp://127.0.0.1:1/x' does not answer"),
        (("serve", "--host", "256.0.0.1"), "cannot be used"),
        (("keys", "create", "--tenant", "unknown"), "there is no tenant 'unknown'"),
        (("keys", "create", "--scopes", "root"), "accepted are files"),
        (("keys", "revoke", "0123"), "there is no key '0123'"),
        (("keys", "tenants", "create", "A B"), "not a tenant id"),
        (("keys", "tenants", "limits", "default", "--max-active-jobs", "x"), "use a whole number or `none`"),
    ],
)
def test_operator_when_wrong_then_one_sentence(
    refused: Callable[..., str], weft: Weft, tmp_path: Path, arguments: tuple[str, ...], expected: str
):
    weft("keys", "tenants", "create", "default", "--data-dir", tmp_path)
    assert expected in refused(*arguments, "--data-dir", tmp_path)


def test_keys_when_the_directory_is_not_there_then_one_sentence(refused: Callable[..., str], tmp_path: Path):
    assert "there is no such directory" in refused("keys", "list", "--data-dir", tmp_path / "none")


@pytest.mark.parametrize("kind", ["port", "store", "base-model"])
def test_serve_when_it_cannot_begin_then_no_key_is_lost(
    kind: str, refused: Callable[..., str], weft: Weft, tmp_path: Path
):
    """The first key is shown once, so it is not made by a start that ends in an error."""
    data_dir = tmp_path / "data"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            "port": ("--port", port),
            "store": ("--port", "0", "--store", "nowhere://bucket"),
            "base-model": ("--port", "0", "--base-model", f"loom={tmp_path}/nowhere"),
        }
        text = refused("serve", "--data-dir", str(data_dir), *wrong[kind])
    assert f"--{kind}: " in text
    assert "first" not in weft("keys", "list", "--data-dir", data_dir).out
