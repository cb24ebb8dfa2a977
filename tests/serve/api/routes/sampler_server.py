"""A stand-in for a vLLM or SGLang server with hot-loaded adapters: its routes, answers and refusals."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
BASE = "org/base"


class SamplerServer:
    def __init__(self, *, is_sglang: bool = False) -> None:
        self.prefix = "" if is_sglang else "/v1"
        self.is_sglang = is_sglang
        self.mode = "good"
        self.loaded: dict[str, list[str]] = {}
        """Files of the adapters by name."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.was_called, self.was_left = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.reply(self, 200, {"object": "list", "data": outer.models()})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append((self.path, body))
                outer.keys.append(self.headers["authorization"])
                outer.post(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def models(self) -> list[dict[str, Any]]:
        return [{"id": BASE, "parent": None}, *({"id": name, "parent": BASE} for name in self.loaded)]

    def reply(self, handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path in (f"{self.prefix}/load_lora_adapter", f"{self.prefix}/unload_lora_adapter"):
            self.load(handler, body)
        elif handler.path in ("/v1/chat/completions", "/v1/completions"):
            self.complete(handler, body)
        else:
            self.reply(handler, 404, {"detail": "Not Found"})

    def load(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        if "unload" in handler.path:
            self.loaded.pop(name)
        elif self.mode == "refuses adapters":
            text = f"Loading lora {name} failed: {body['lora_path']} has DoRA."
            return self.reply(handler, 400, {"error": {"message": text, "type": "BadRequestError"}})
        elif name in self.loaded:
            return self.reply(
                handler, 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
            )
        else:
            self.loaded[name] = sorted(path.name for path in Path(body["lora_path"]).iterdir())
        self.reply(handler, 200, f"Success: LoRA adapter '{name}' added successfully.".encode())

    def complete(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        known = {f"{BASE}:{name}" if self.is_sglang else name for name in self.loaded} | {BASE}
        if body["model"] not in known:
            return self.reply(handler, 404, {"error": {"message": "The model does not exist."}})
        status = {"refuses": 400, "busy": 503, "broken": 500, "key": 401}.get(self.mode, 200)
        if status != 200:
            return self.reply(handler, status, {"error": {"message": "temperature must be in [0, 2]."}})
        if self.mode == "silent":
            self.was_called.set()
            return None if handler.connection.recv(1) else self.was_left.set()
        if self.mode == "garbage":
            return self.reply(handler, 200, b"<html>")
        is_chat = "messages" in body
        same = {"id": "x-1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            own = {"message": {"role": "assistant", "content": "well"}} if is_chat else {"text": "well"}
            choices = [{"index": 0, "finish_reason": "stop", "logprobs": None, **own}]
            kind = "chat.completion" if is_chat else "text_completion"
            return self.reply(handler, 200, {**same, "object": kind, "choices": choices, "usage": USAGE})
        handler.send_response(200)
        handler.end_headers()
        try:
            while self.mode == "endless":
                handler.wfile.write(b'data: {"choices": [{"index": 0, "delta": {"content": "well"}}]}\n\n')
        except ConnectionError:
            return self.was_left.set()
        for text in ("we", "ll"):
            own = {"delta": {"content": text}} if is_chat else {"text": text}
            chunk = {**same, "object": "chat.completion.chunk", "choices": [{"index": 0, "finish_reason": None, **own}]}
            handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if self.mode == "dies":
                return None
        if body.get("stream_options", {}).get("include_usage"):
            handler.wfile.write(f"data: {json.dumps({**same, 'choices': [], 'usage': USAGE})}\n\n".encode())
        return handler.wfile.write(b"data: [DONE]\n\n") and None
