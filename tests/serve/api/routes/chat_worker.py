"""A stand-in for a worker that answers chats."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COUNTS = {"prompt_tokens": 5, "completion_tokens": 3}


CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


class Worker:
    """A stand-in for a worker process, at its real boundary: HTTP."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.mode = "good"
        self.was_left = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append({**body, "token": self.headers["x-weft-token"], "path": self.path})
                outer.reply(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        status = {"refuse": 400, "busy": 503, "wrong token": 401, "broken adapter": 400}.get(self.mode, 200)
        if handler.path == "/check" and status == 200:
            status = 204
        handler.send_response(status)
        handler.end_headers()
        logprobs = []
        if body.get("logprobs") is not None:
            top = [["well", -0.5], [" bad", -2.0]][: body["logprobs"]]
            logprobs = [{"token": "well", "logprob": -0.5, "top": top, "offset": 0}]
        if status == 204:
            return
        if self.mode == "broken adapter":
            handler.wfile.write(b'{"error": {"message": "q_proj is missing.", "code": "adapter_file", "param": null}}')
        elif status != 200:
            handler.wfile.write(
                b'{"error": {"message": "the prompt is too long.", "code": "data", "param": "messages"}}'
            )
        elif self.mode == "garbage":
            handler.wfile.write(b"hello")
        elif not body["stream"]:
            answer = {"text": "well, hello", "done": True, "finish_reason": "length", "logprobs": logprobs, **COUNTS}
            handler.wfile.write(json.dumps(answer).encode())
        elif self.mode == "endless":
            self.talk_until_left(handler)
        else:
            pieces = ["well", ", ", "hello"]
            for i, text in enumerate(pieces):
                done = i == len(pieces) - 1
                if self.mode == "dies" and done:
                    return
                answer = {"text": text, "done": done, "finish_reason": "stop" if done else None, **COUNTS}
                answer["logprobs"] = logprobs if i == 0 else []
                handler.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
                handler.wfile.flush()

    def talk_until_left(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            while True:
                handler.wfile.write(b'data: {"text": "well", "done": false}\n\n')
        except ConnectionError:
            self.was_left.set()
