"""`weft serve` as a process of its own, the verbs beside it, and the jobs that tests send there and train here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from small_model import small_model

from weft.cli.main import main

PATIENCE_S = 600.0
"""How long a test waits for what must happen; it matters only if it does not."""

WORDS = ("warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill")
CAPACITY = 2048
"""Of a microbatch, in `weft serve` as in a jobs file without the setting."""


def weft(*arguments: object) -> str:
    """Runs `weft ARGUMENTS` in this process and returns what it printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, printed.getvalue()
    return printed.getvalue()


def wait(until: Callable[[], Any], timeout: float = PATIENCE_S) -> Any:
    """What `until` returns, once that is something."""
    deadline = time.monotonic() + timeout
    while not (found := until()):
        assert time.monotonic() < deadline, "timed out while waiting"
        time.sleep(0.1)
    return found


@dataclass(frozen=True)
class Wish:
    """A job as its user thinks of it: to be sent to a service, or to be written into a jobs file."""

    name: str
    seed: int
    max_steps: int
    r: int = 4
    batch_size: int = 4
    dropout: float = 0.1
    save_steps: int = 1000

    @property
    def data(self) -> bytes:
        turns = [
            [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper() + self.name}]
            for word in WORDS
        ]
        return "".join(json.dumps({"messages": chat}) + "\n" for chat in turns).encode()

    @property
    def request(self) -> dict[str, Any]:
        """For `fine_tuning.jobs.create`, but for the file."""
        hyperparameters = {"n_epochs": 9, "batch_size": self.batch_size, "learning_rate_multiplier": 10}
        lora = {"r": self.r, "dropout": self.dropout, "target_modules": ["q_proj", "down_proj"]}
        ours = {
            "lora": lora,
            "max_steps": self.max_steps,
            "max_length": 48,
            "settings": {"save_steps": self.save_steps},
        }
        return {
            "model": "tiny",
            "suffix": self.name,
            "seed": self.seed,
            "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
            "extra_body": ours,
        }

    def written(self, folder: Path) -> dict[str, Any]:
        """For a jobs file."""
        (folder / f"{self.name}.jsonl").write_bytes(self.data)
        return {
            "name": self.name,
            "train_data": f"{self.name}.jsonl",
            "seed": self.seed,
            "num_train_epochs": 9,
            "global_batch_size": self.batch_size,
            "learning_rate": 2e-3,
            "max_steps": self.max_steps,
            "max_length": 48,
            "adapter": {"r": self.r, "lora_dropout": self.dropout, "target_modules": ["q_proj", "down_proj"]},
        }


@dataclass(frozen=True)
class Trained:
    """What `weft train` makes of a job."""

    adapter: dict[str, bytes]
    tokens: int


def train(wishes: list[Wish], folder: Path) -> dict[str, Trained]:
    """Runs `weft train` on a file of these jobs."""
    folder.mkdir()
    jobs = {"base_model": str(small_model()), "device": "cpu", "jobs": [wish.written(folder) for wish in wishes]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    weft("train", folder / "jobs.yaml", "--out", folder / "run")
    found = {}
    for wish in wishes:
        status = json.loads((folder / "run" / wish.name / "status.json").read_text())
        files = {path.name: path.read_bytes() for path in (folder / "run" / wish.name / "adapter").iterdir()}
        found[wish.name] = Trained(files, status["trained_tokens"])
    return found


@dataclass
class Service:
    """`weft serve` on a data directory; it can be killed and started again at the same address."""

    data_dir: Path
    options: tuple[str, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.data_dir.mkdir()
        self.log = self.data_dir.parent / "log.txt"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def add_tenant(self, tenant: str) -> None:
        """A tenant and a key for it, by `weft keys`."""
        home = ("--data-dir", self.data_dir, *self._database)
        weft("keys", "tenants", "create", tenant, *home)
        self.keys[tenant] = weft("keys", "create", "--tenant", tenant, *home).strip()

    @property
    def _database(self) -> tuple[str, ...]:
        return self.options[self.options.index("--db") :][:2] if "--db" in self.options else ()

    def start(self) -> None:
        """Starts it, once no process of an earlier start listens any more, and waits until it answers."""
        wait(self._is_free)
        home = ("--port", str(self.port), "--data-dir", str(self.data_dir), "--base-model", f"tiny={small_model()}")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", *home, *self.options],
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                # Bits depend on the number of threads; `weft train` here has one.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        wait(self._answers)

    def _is_free(self) -> bool:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", self.port)):
            return True
        return False

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def sdk(self, tenant: str, **options: Any) -> openai.OpenAI:
        """The unmodified SDK with the tenant's key."""
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=self.keys[tenant], **options)

    def log_lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def children(self, kind: str) -> list[int]:
        """Its processes of a kind, `worker` or `api`, that live now."""
        started = [line for line in self.log_lines() if line.get("child", "").startswith(kind) and "pid" in line]
        return [line["pid"] for line in started if self._is_ours(line["pid"])]

    def _is_ours(self, pid: int) -> bool:
        """Whether a process is a living child of the service, and not another that has got a dead one's number."""
        assert self.process is not None
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            return False
        return int(parent) == self.process.pid and state != "Z"

    def kill(self) -> None:
        """SIGKILL to the process that answers or supervises; its children notice."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
