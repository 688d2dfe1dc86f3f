"""How long the API process's event loop is held up, by what: nobody's tokens may wait for another one's request.

    python -m benchmarks event_loop [--seconds 3] [--streams 64]

While streams run, one kind of work after the other is sent, over and over. A probe inside the server sleeps for a
millisecond at a time: what the process does between two of its turns, less that millisecond, held the loop up. The CPU
time of the loop's own thread counts only that; wall time also whatever else the machine does and waits for threads.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.api_overhead import write_model

MAX_LEN = 1024
PROBE_SECONDS = 0.001


def serve(record: str, arguments: list[str]) -> int:
    """(The other process.) `octavo serve` with the probe: appends a line "wall cpu" to ``record`` at every SIGUSR1."""
    from octavo.cli.main import main
    from octavo.entrypoints import server

    become_ready = server.become_ready

    async def probed(*args: object) -> None:
        await become_ready(*args)  # type: ignore[arg-type]
        tasks.append(asyncio.ensure_future(probe()))

    async def probe() -> None:
        longest = [0.0, 0.0]

        def tell() -> None:
            with open(record, "a") as file:
                file.write(f"{longest[0]} {longest[1]}\n")
            longest[:] = 0.0, 0.0

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PROBE_SECONDS)
            longest[0] = max(longest[0], time.perf_counter() - wall - PROBE_SECONDS)
            longest[1] = max(longest[1], time.thread_time() - cpu - PROBE_SECONDS)

    tasks: list[asyncio.Task[None]] = []
    server.become_ready = probed  # type: ignore[assignment]
    return main(["serve", *arguments])


class Work:
    """Kinds of requests, as (method, path, body)."""

    @staticmethod
    def completions(**body: object) -> tuple[str, str, bytes]:
        return "POST", "/v1/completions", json.dumps(body, ensure_ascii=False).encode()

    @classmethod
    def kinds(cls) -> dict[str, tuple[str, str, bytes]]:
        million = 1_000_000
        ids = list(range(200)) * 950
        return {
            "streams alone": ("GET", "/livez", b""),
            "/metrics": ("GET", "/metrics", b""),
            "4 MB of text": cls.completions(prompt="a b " * million),
            "4 MB of other scripts": cls.completions(prompt="日本語 é" * (3 * million // 10)),
            "4 MB of escapes": ("POST", "/v1/completions", b'{"prompt": "' + b"\\u00e9" * (4 * million // 6) + b'"}'),
            "190,000 ids": cls.completions(prompt=ids),
            "60,000 objects": cls.completions(prompt="x", metadata=[{"a": 1}] * 49_000),
            "text in need of tokens": cls.completions(prompt="The quick brown fox. " * 40, max_tokens=1),
            "300 prompts at once": cls.completions(prompt=["The quick brown fox"] * 300, max_tokens=1),
            "10,000 messages": (
                "POST",
                "/v1/chat/completions",
                json.dumps({"messages": [{"role": "user", "content": "hello"}] * 10_000}).encode(),
            ),
            "log-probabilities of 16 answers": cls.completions(prompt="x", n=16, max_tokens=200, logprobs=20),
            "log-probabilities of a prompt": cls.completions(prompt=ids[:900], max_tokens=1, prompt_logprobs=20),
            "broken JSON of 4 MB": ("POST", "/v1/completions", b'{"prompt": "' + b"x" * 4 * million),
        }


def repeat(port: int, until: float, request: tuple[str, str, bytes]) -> dict[int, int]:
    """Send one request after the other; returns how many had which status."""
    statuses: dict[int, int] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not statuses or time.monotonic() < until:
        method, path, body = request
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        time.sleep(0.02)
    connection.close()
    return statuses


class Streams(threading.Thread):
    """Keeps so many streams running."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self.port, self.count, self.chunks = port, count, 0

    def run(self) -> None:
        asyncio.run(self.all())

    async def all(self) -> None:
        await asyncio.gather(*(self.one() for _ in range(self.count)))

    async def one(self) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            while data := await reader.read(1 << 18):
                self.chunks += data.count(b"data:")
                await asyncio.sleep(0.05)
            writer.close()


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MAX_LEN)
        record, log = Path(folder, "record"), Path(folder, "log")
        with log.open("wb") as file:
            flags = {
                "load-format": "dummy",
                "host": "127.0.0.1",
                "port": 0,
                "max-num-seqs": options.streams + 16,
                "max-num-queued-reqs": 1000,
                "kv-cache-memory-bytes": 256 << 20,
                "chat-template": "{{ messages[0].content }}",
            }
            command = [sys.executable, "-m", "benchmarks.event_loop", "--serve", record, folder, "--disable-access-log"]
            server = subprocess.Popen(
                [*command, *(str(part) for flag, value in flags.items() for part in (f"--{flag}", value))],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[1],
            )
        try:
            while not (found := re.search(r"serving .* at http://127.0.0.1:(\d+)", log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.05)
            measure(server.pid, int(found[1]), record, options)
        finally:
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGTERM)
            server.wait()
    return 0


def measure(pid: int, port: int, record: Path, options: argparse.Namespace) -> None:
    streams = Streams(port, options.streams)
    streams.start()
    time.sleep(2)

    def longest() -> list[float]:
        lines = len(record.read_text().splitlines()) if record.exists() else 0
        os.kill(pid, signal.SIGUSR1)
        while not record.exists() or len(record.read_text().splitlines()) == lines:
            time.sleep(0.01)
        return [1e3 * float(word) for word in record.read_text().splitlines()[-1].split()]

    print(f"{'the loop was held up for at most':<34} {'CPU':>8} {'wall':>8}")
    for name, request in Work.kinds().items():
        repeat(port, 0, request)  # warms up
        longest()
        statuses = repeat(port, time.monotonic() + options.seconds, request)
        wall, cpu = longest()
        told = ", ".join(f"{count} x {status}" for status, count in statuses.items())
        print(f"{name:<34} {cpu:5.1f} ms {wall:5.1f} ms   {told}", flush=True)
    print(f"{streams.chunks:,} chunks meanwhile")


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--serve"] else main())
