"""A small Hugging Face hub on loopback: the routes that fetching a model uses, and the faults that real hubs have."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import torch
from safetensors.torch import save

# A repository with all that a model's has, most of it of no use to a server (b"never").
CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
).encode()
BIG = save({"w": torch.arange(200_000, dtype=torch.float32)})  # 800 kB: many pieces
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"hi",
    "additional_chat_templates/rag.jinja": b"rag",
    "model.safetensors": BIG,
    "pytorch_model.bin": b"never",
    "README.md": b"never",
    "onnx/model.onnx": b"never",
    "onnx/config.json": b"never",
    "original/consolidated.safetensors": b"never",
    "modeling_custom.py": b"never",
}
NEEDED = {n for n, data in FILES.items() if data != b"never"}

LARGE = 10_000  # bytes from which a file is kept as git LFS does: hashed by sha256 and served by another host


@dataclass
class Repo:
    files: dict[str, bytes]
    token: str | None = None  # needed to see it
    gated: bool = False
    commit: str = ""

    def __post_init__(self) -> None:
        content = json.dumps({n: hashlib.sha256(b).hexdigest() for n, b in self.files.items()}, sort_keys=True)
        self.commit = self.commit or hashlib.sha1(content.encode()).hexdigest()

    def siblings(self) -> list[dict]:
        found = []
        for name, data in self.files.items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if len(data) >= LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            found.append(entry)
        return found


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Seen:
    path: str
    start: int  # of the range that was asked for
    authorization: str | None
    host: str
    sent: int = 0  # counted before the client has it
    end: int | None = None  # of the range, None: the file's


@dataclass
class Hub:
    """``fail`` holds (status, headers) to answer the next requests with; ``drop_after`` ends connections early."""

    repos: dict[str, Repo] = field(default_factory=dict)
    fail: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    drop_after: int | None = None  # bytes of a large file, then the connection is closed
    drops: int = 0  # how often
    pause: float = 0.0  # seconds between pieces of a large file
    hang: bool = False  # never answer
    damage: bool = False  # turn a bit of every large file
    ignore_range: bool = False
    hide_sizes: bool = False
    host: str = "127.0.0.1"  # where it listens
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            state = hub

        self.server = ThreadingHTTPServer((self.host, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://{self.host}:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang, self.pause = False, 0.0
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sent(self, ending: str) -> list[Seen]:
        """Requests that got bytes of the file of that name."""
        return [s for s in self.seen if s.path.endswith(ending) and s.sent]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        asked, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        seen = Seen(path, int(asked), self.headers.get("Authorization"), self.headers.get("Host", ""))
        seen.end = int(last) + 1 if last else None
        hub.seen.append(seen)
        while hub.hang:
            time.sleep(0.05)
        if hub.fail:
            return self._refuse(*hub.fail.pop(0))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._info("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        if parts[0] == "storage":
            return self._send("/".join(parts[1:3]), "/".join(parts[3:]), seen)
        return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), seen)

    def _allowed(self, name: str) -> Repo | None:
        repo, token = self.state.repos.get(name), self.headers.get("Authorization")
        if repo is None or (repo.token and token is None):
            # Like the real one: without a token it does not say whether a private model is there.
            self._refuse(404 if token else 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
            return None
        if repo.token and token != f"Bearer {repo.token}":
            self._refuse(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return None
        return repo

    def _info(self, name: str, revision: str) -> None:
        repo = self._allowed(name)
        if repo is None:
            return
        if revision not in ("main", repo.commit):
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"})
        siblings = repo.siblings()
        if self.state.hide_sizes:
            for entry in siblings:
                entry.pop("size"), entry.get("lfs", {}).pop("size", None)
        body = json.dumps({"id": name, "sha": repo.commit, "siblings": siblings}).encode()
        self._answer(200, body, {"Content-Type": "application/json"})

    def _resolve(self, name: str, commit: str, file: str, seen: Seen) -> None:
        hub, repo = self.state, self._allowed(name)
        if repo is None:
            return
        if repo.gated and self.headers.get("Authorization") is None:
            return self._refuse(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if commit not in (repo.commit, "main") or file not in repo.files:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"})
        data = repo.files[file]
        if len(data) >= LARGE:  # another host, as far as anybody can tell
            other = "localhost" if hub.host == "127.0.0.1" else hub.host
            there = f"http://{other}:{hub.port}/storage/{name}/{file}"
            etag = hashlib.sha256(data).hexdigest()
            headers = {"Location": there, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'}
            return self._answer(302, b"", headers | {"X-Repo-Commit": repo.commit, "ETag": f'"{etag}"'})
        seen.sent = len(data)
        self._answer(200, data, {"ETag": f'"{git_sha1(data)}"', "X-Repo-Commit": repo.commit})

    def _send(self, name: str, file: str, seen: Seen) -> None:
        hub, data = self.state, self.state.repos[name].files[file]
        if hub.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0 if hub.ignore_range else seen.start
        partial = start > 0 or (seen.end is not None and not hub.ignore_range)
        data = data if hub.ignore_range else data[: seen.end]
        if start >= len(data):
            return self._refuse(416, {})
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        left = hub.drop_after if hub.drops > 0 else None
        for at in range(start, len(data), 1 << 14):
            piece = data[at : at + (1 << 14)]
            if left is not None and seen.sent + len(piece) > left:
                hub.drops -= 1
                self.close_connection = True
                return
            seen.sent += len(piece)
            try:
                self.wfile.write(piece)
            except OSError:
                seen.sent -= len(piece)
                self.close_connection = True
                return
            if hub.pause:
                time.sleep(hub.pause)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self._answer(status, b"{}", headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
