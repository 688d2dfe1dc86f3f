"""A plain web server on loopback: ranges, ETags and If-Range as real ones do them, and connections that break."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """``files``: path -> content. ``seen``: (path, first byte asked for, bytes sent, Authorization) of each GET, before
    its client sees an answer."""

    files: dict[str, bytes]
    token: str | None = None
    judge: Callable[[str, Message], int] | None = None  # the status that refuses a path with these headers; 0: none
    drop_after: int | None = None  # bytes of one answer, then the connection is closed
    drops: int = 0  # how often
    change_after_drop: bytes | None = None  # what the file of that answer is afterwards
    ranges: bool = True
    absent: int = 404  # what is answered for a file that is not there
    seen: list[tuple[str, int, int, str | None]] = field(default_factory=list)

    def __enter__(self) -> Web:
        web = self

        class Handler(_Handler):
            state = web

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sent(self, path: str) -> int:
        """Bytes of this file that went out, probes of one byte left out."""
        return sum(count for name, _, count, _ in self.seen if name == path and count > 1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Web

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        web, path = self.state, self.path.partition("?")[0]
        if web.token and self.headers.get("Authorization") != f"Bearer {web.token}":
            return self._refuse(401)
        if web.judge and (status := web.judge(self.path, self.headers)):
            return self._refuse(status)
        if path not in web.files:
            return self._refuse(web.absent)
        data = web.files[path]
        etag = f'"{hashlib.sha256(data).hexdigest()[:8]}"'
        first, last = 0, len(data) - 1
        wanted = self.headers.get("Range", "")
        partial = web.ranges and wanted and self.headers.get("If-Range", etag) == etag
        if partial:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
            if first > last:
                return self._refuse(416)
        body = data[first : last + 1]
        breaks = web.drops > 0 and web.drop_after is not None and len(body) > web.drop_after
        if breaks:
            web.drops -= 1
            body = body[: web.drop_after]
            self.close_connection = True
        web.seen.append((path, first, len(body), self.headers.get("Authorization")))
        self.send_response(206 if partial else 200)
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("Content-Length", str(last + 1 - first))
        if partial:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        try:
            for at in range(0, len(body), 1 << 14):
                self.wfile.write(body[at : at + (1 << 14)])
        except OSError:
            self.close_connection = True
        if breaks and web.change_after_drop is not None:
            web.files[path] = web.change_after_drop

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
