"""An OpenAI-compatible server whose answers a test writes: what no real model can be made to say on request. At / is
the page of a real one."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.entrypoints.chat_page import chat_page

API_KEY = "scripted-secret-key"


class ScriptedServer:
    """``answers``: by the text of the last message, pieces of the answer; a number among them is a pause in seconds, an
    event is waited for, a pair is reasoning and text, a dict is a delta; at None the server is gone. ``refusals``: by
    the same, why there is none. ``reads_images``: the model does. ``requests``: what was asked. ``first_token_sent``:
    `time.time` of the last answer's begin. ``most_messages``: a longer conversation does not fit. ``loading``: so many
    requests come before the model is loaded. ``at_once``: an answer is sent as one piece, as by a proxy that collects
    it."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.refusals: dict[str, str] = {}
        self.reads_images = False
        self.requests: list[dict[str, Any]] = []
        self.first_token_sent = 0.0
        self.needs_key = False
        self.most_messages: int | None = None
        self.loading = 0
        self.at_once = False
        self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, script: ScriptedServer, *args: Any) -> None:
        self._script = script
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            page, headers = chat_page()
            self._send(page, {"Content-Type": "text/html; charset=utf-8", **headers})
            return
        if self.path == "/readyz":
            self._send(b"ok", {})
            return
        sampling = {"temperature": 0.35, "top_p": 0.8}
        card = {"id": "scripted", "max_model_len": 8192, "default_sampling_params": sampling}
        if self._script.reads_images:
            card["input_modalities"] = ["text", "image"]
        self._json({"data": [card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" not in body:
            self._json({})
            return
        if not self._may():
            return
        self._script.requests.append(body)
        said = body["messages"][-1]["content"]
        text = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
        pieces = self._script.answers.get(text, ["fine"])
        if text in self._script.refusals:
            self._json({"error": {"message": self._script.refusals[text]}}, 400)
            return
        if len(body["messages"]) > (self._script.most_messages or len(body["messages"])):
            self._json({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):  # its reader has gone
            if not self._script.at_once:
                self._stream(pieces)
                return
            out, self.wfile = self.wfile, io.BytesIO()
            self._stream(pieces)
            out.write(self.wfile.getvalue())
            self.wfile = out

    def _stream(self, pieces: list[Any]) -> None:
        count = 0
        for piece in pieces:
            if isinstance(piece, float):
                time.sleep(piece)
                continue
            if isinstance(piece, threading.Event):
                assert piece.wait(60), "nobody has seen the pieces before"
                continue
            if piece is None:
                return
            thought, text = piece if isinstance(piece, tuple) else ("", piece)
            delta = piece if isinstance(piece, dict) else {"content": text, "reasoning_content": thought}
            count += 1
            if count == 1:
                self._script.first_token_sent = time.time()
            self._event({"id": "chatcmpl-x", "choices": [{"delta": delta}]})
        cached = {"cached_tokens": 48}
        usage = {"prompt_tokens": 64, "completion_tokens": count, "prompt_tokens_details": cached}
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _may(self) -> bool:
        if self._script.loading > 0:
            self._script.loading -= 1
            self._send(b'{"error": {"message": "The model is still loading", "code": 503}}', {"Retry-After": "0"}, 503)
            return False
        if self._script.needs_key and self.headers.get("Authorization") != f"Bearer {API_KEY}":
            self._json({"error": {"message": "wrong API key"}}, 401)
            return False
        return True

    def _json(self, body: dict[str, Any], status: int = 200) -> None:
        if status == 200 and not self._may():
            return
        self._send(json.dumps(body).encode(), {}, status)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
