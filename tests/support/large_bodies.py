"""Clients with bodies of 30 MiB, as a program: several of it at once send faster than one process can.

python large_bodies.py PORT KEY CLIENTS SEED KIND...   until its input ends; then statuses by number, as JSON. With
ONCE in place of kinds each client sends one whole body.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

PIECE = b"a" * 2**20


def head(key: str, length: int | None, path: str = "/v1/completions") -> bytes:
    """Of a request; without a length its body comes in chunks."""
    told = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{told}\r\n\r\n".encode()


def status_of(sock: socket.socket, seconds: float) -> int:
    """Of the answer; 0: none has come."""
    sock.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(sock.recv(4096).split(b" ", 2)[1])
    return 0


class Clients:
    """Threads that send until `ended`."""

    def __init__(self, port: int, key: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.ended = threading.Event()
        self._port, self._key = port, key

    def send(self, kind: Callable[[socket.socket, random.Random], None], die: random.Random, seconds: float) -> None:
        """One request. An answer may come before the body has gone: then sending fails, and the answer is there."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=25) as sock:
            with contextlib.suppress(OSError):
                kind(sock, die)
            self.statuses[status_of(sock, seconds)] += 1

    def go_on(self, kind: Callable[[socket.socket, random.Random], None], die: random.Random) -> None:
        """Requests, one after the other."""
        while not self.ended.is_set():
            self.send(kind, die, 2)
            self.ended.wait(0.1)

    def whole(self, sock: socket.socket, _: random.Random) -> None:
        """All at once."""
        sock.sendall(head(self._key, 30 * 2**20 + 28) + b'{"model":"tiny","prompt":"' + PIECE * 30 + b'"}')

    def slow(self, sock: socket.socket, _: random.Random) -> None:
        """The end never comes."""
        sock.sendall(head(self._key, 30 * 2**20 + 29) + b'{"model":"tiny","prompt":"' + PIECE * 28)
        while not self.ended.wait(0.3):
            sock.sendall(b"x")

    def hostile(self, sock: socket.socket, die: random.Random) -> None:
        """What takes long to read."""
        body = die.choice([b"[" * 2**20, b'\\"' * 2**19, b"{}," * 2**18, b'"a":' * 2**18])
        sock.sendall(head(self._key, 30 * 2**20) + b'{"model":"tiny","prompt":' + body * die.randrange(10, 29))

    def chunked(self, sock: socket.socket, die: random.Random) -> None:
        """No length is told."""
        sock.sendall(head(self._key, None))
        for _ in range(die.randrange(20, 40)):
            sock.sendall(b"100000\r\n" + PIECE + b"\r\n")


def main(port: int, key: str, clients: int, seed: int, kinds: list[str]) -> None:
    """See the top."""
    made = Clients(port, key)
    threads = []
    for number in range(clients):
        die = random.Random(seed * 1000 + number)
        if kinds == ["ONCE"]:
            threads.append(threading.Thread(target=made.send, args=(made.whole, die, 60)))
        else:
            kind = getattr(made, kinds[number % len(kinds)])
            threads.append(threading.Thread(target=made.go_on, args=(kind, die)))
    for thread in threads:
        thread.start()
    if kinds != ["ONCE"]:
        sys.stdin.read()
        made.ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps(made.statuses))


class Attack:
    """Clients in processes of their own, until it is left; `statuses` are known then."""

    def __init__(self, port: int, key: str, clients: int, kinds: tuple[str, ...], processes: int = 4) -> None:
        self.statuses: Counter[int] = Counter()
        each = (str(port), key, str(clients // processes))
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *each, str(seed), *kinds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(processes)
        ]

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            said, _error = process.communicate()
            self.statuses.update({int(status): count for status, count in json.loads(said).items()})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
