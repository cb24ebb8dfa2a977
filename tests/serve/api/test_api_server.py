"""A process that answers requests ends when it is requested to, whenever that is, and never imports torch."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import uvicorn
from service_home import Home

from weft.serve.api.app import listen, run_app
from weft.serve.api.observe import log_json


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_when_stopped_before_it_serves_then_does_not_begin(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: signal.Signals
):
    """A service that is stopped while it starts would otherwise leave a process that holds its port; one line of the
    log reports that it stops."""
    caplog.set_level(logging.INFO, "weft.serve")
    serve, stops = uvicorn.Server.run, []

    def run(self: uvicorn.Server, sockets: Any = None) -> None:
        signal.raise_signal(number)
        serve(self, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    rescue = threading.Timer(60, os.kill, (os.getpid(), signal.SIGTERM))
    handlers = [signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)]
    with listen("127.0.0.1", 0) as sock:
        rescue.start()
        try:
            run_app(home.app, sock, lambda: stops.append(number))
        finally:
            was_needed = rescue.finished.is_set()
            rescue.cancel()
    assert stops and not was_needed
    (line,) = [record for record in caplog.records if record.getMessage() == "stopping"]
    assert line.fields["signal"] == number.name
    assert logging.getLogger("weft.serve").handlers == [], "the program decides where logs go"
    assert [signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_log_when_a_library_warns_then_each_line_is_json():
    program = (
        "import warnings; from weft.serve.api.observe import log_json; log_json(); "
        "warnings.warn('first line\\nsecond line'); warnings.warn('old', DeprecationWarning)"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], "first line\nsecond line" in line["message"]) for line in lines] == [
        ("warning", True),
        ("warning", False),
    ]


def test_log_when_standard_error_is_replaced_then_lines_go_to_the_new_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with io.StringIO() as before, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", before)
        log_json()
    logging.getLogger("weft.serve").info("later")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "later"


def test_api_when_imported_then_without_torch():
    code = (
        "import sys\n"
        "import weft.serve.api.app, weft.serve.api.app, weft.serve.db.files, weft.serve.supervise\n"
        "import weft.cli.service.keys\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
