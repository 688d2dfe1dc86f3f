"""A web of our own for servers under test: ``python -m support.media_server serve ...`` is ``octavo serve`` whose name
server and network are these. Hosts have the addresses below; whatever is dialled ends at the port OCTAVO_TEST_WEB of
this machine, and is noted in the file OCTAVO_TEST_DIALLED. What waits for long waits for six seconds.
"""

from __future__ import annotations

import asyncio
import gzip
import http.server
import itertools
import os
import sys
from typing import Any, ClassVar

import httpcore

WEB, DIALLED = "OCTAVO_TEST_WEB", "OCTAVO_TEST_DIALLED"
SECONDS = 6.0  # for a fetch (10 of a server) and to read an image (60), so that tests need not wait for those
PUBLIC = "93.184.216.34"
BOMB = gzip.compress(bytes(50_000_000))  # made once: it takes a good part of the second that a refusal may
# One answer after the other, the last for ever.
ADDRESSES: dict[str, list[list[str]]] = {
    "pictures.example": [[PUBLIC]],
    "private.example": [["10.0.0.1"]],
    "metadata.example": [["169.254.169.254"]],
    "both.example": [[PUBLIC, "127.0.0.1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "rebinding.example": [[PUBLIC], ["127.0.0.1"]],
}


class _Network(httpcore.AsyncNetworkBackend):
    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        with open(os.environ[DIALLED], "a", encoding="utf-8") as noted:
            noted.write(f"{host}\n")
        return await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", int(os.environ[WEB]), *args, **kwargs)


class Web(http.server.BaseHTTPRequestHandler):
    """What a test's web server answers, by path; ``picture`` is a file that is well."""

    picture = b""
    seen: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        try:
            getattr(self, "on_" + self.path.strip("/").partition(".")[0], self.on_picture)()
        except OSError:  # the client has had enough
            self.close_connection = True

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def on_picture(self) -> None:
        self.answer(self.picture)

    def on_redirect(self) -> None:
        self.answer(b"", 302, Location="http://127.0.0.1/secret.png")

    def on_gzip(self) -> None:
        self.answer(BOMB, Content_Encoding="gzip")

    def on_huge(self) -> None:
        self.answer(b"\x89PNG\r\n\x1a\n" + bytes(21_000_000))

    def on_endless(self) -> None:
        self.answer(b"", Content_Length="1000000000000")
        for _ in itertools.count():
            self.wfile.write(bytes(1 << 20))

    def on_slow(self) -> None:
        self.answer(b"", Content_Length="1000")
        for _ in range(100):
            self.wfile.write(b"\x89")
            self.wfile.flush()
            self.server.stop.wait(0.1)  # type: ignore[attr-defined]

    def on_missing(self) -> None:
        self.answer(b"no", 404)

    def on_page(self) -> None:
        self.answer(b"<html></html>", Content_Type="image/png")

    def log_message(self, *args: object) -> None:
        """Nothing."""


def main() -> int:
    """`octavo` in that web."""
    from functools import partial

    from octavo.entrypoints import images
    from octavo.multimodal import fetch, pool

    left = {host: list(answers) for host, answers in ADDRESSES.items()}

    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(0)
        answers = left.get(host, [[]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    fetch.SECONDS = pool._SECONDS = SECONDS
    images.fetch = partial(fetch.fetch, resolve=resolve, network=_Network())  # type: ignore[assignment]
    from octavo.cli.main import main as octavo

    return octavo()


if __name__ == "__main__":
    sys.exit(main())
