"""Connections between the nodes of an engine: TCP, on which each side shows that it knows the group's token, and each
frame carries a code over its content and its place in the stream.

Handshake, of which all parts but the last have fixed sizes: the one that connects sends a greeting, its node, what the
connection is for and a nonce; the other answers with a nonce of its own; then the first sends HMAC-SHA256(token, all of
that), and the other the same over another label, or why it refuses. Keys of both directions are derived likewise. So
neither side does anything for one that does not know the token, and no frame can be changed, repeated or left out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.system.channel import Channel, Frames, Kind

TOKEN = "OCTAVO_CLUSTER_TOKEN"
MAX_FRAME = 64 << 20  # bytes
ROLES = ("control", "tensors", "beats")  # what connections are for; each node makes one of each
_GREETING = b"octavo-1"
_HELLO = struct.Struct("=8sIB32s")  # greeting, node, role, nonce
_SIZE, _HEAD, _CODE = 32, struct.Struct("=IB"), 16
_SECONDS = 5.0  # for a handshake
_ACCEPTED, _WRONG_TOKEN, _NOT_EXPECTED = range(3)


class RefusedError(ConfigError):
    """The other side does not take this one."""


def cluster_token() -> bytes:
    """The group's token. Raises ConfigError where there is none."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise ConfigError(f"{TOKEN} is not set: an engine of several nodes needs it, the same on each")
    return token.encode()


@dataclass(frozen=True)
class Greeted:
    """Who has connected."""

    node: int
    role: str
    channel: SignedChannel


class _SignedFrames(Frames):
    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key, self._number = key, 0

    def take(self) -> tuple[Kind, bytearray] | None:
        """The next frame that is complete. Raises EOFError for one that the other side has not sent so."""
        if len(self._data) < _HEAD.size:
            return None
        size, kind = _HEAD.unpack_from(self._data)
        if size > MAX_FRAME:
            raise EOFError(f"a frame of {size} bytes is too large")
        end = _HEAD.size + size
        if len(self._data) < end + _CODE:
            return None
        content = self._data[:end]
        if not hmac.compare_digest(_code(self._key, self._number, content), self._data[end : end + _CODE]):
            raise EOFError("a frame is not authentic")
        self._number += 1
        del self._data[: end + _CODE]
        return Kind(kind), content[_HEAD.size :]


class SignedChannel(Channel):
    """A `Channel` whose frames carry their codes."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        super().__init__(sock)
        self._frames = _SignedFrames(receive_key)
        self._key, self._number = send_key, 0

    def send_frame(self, data: bytes) -> None:
        """See `Channel`."""
        code = _code(self._key, self._number, data)
        self._number += 1
        super().send_frame(data + code)


def _code(key: bytes, number: int, content: bytes | bytearray) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + content, hashlib.sha256)[:_CODE]


def _derive(token: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, label + b"|" + nonces, hashlib.sha256)


def accept(sock: socket.socket, token: bytes, expected: set[tuple[int, str]]) -> Greeted | None:
    """The handshake with one that has connected; None, and the connection is closed, if it does not end well.
    ``expected``: nodes and roles that are still wanted."""
    try:
        sock.settimeout(_SECONDS)
        hello = _read(sock, _HELLO.size)
        greeting, node, role, _ = _HELLO.unpack(hello)
        if greeting != _GREETING or role >= len(ROLES):
            raise EOFError
        nonce = secrets.token_bytes(_SIZE)
        sock.sendall(nonce)
        shared = hello + nonce
        if not hmac.compare_digest(_read(sock, _SIZE), _derive(token, b"client", shared)):
            sock.sendall(bytes([_WRONG_TOKEN]))
            raise EOFError
        if (node, ROLES[role]) not in expected:
            sock.sendall(bytes([_NOT_EXPECTED]))
            raise EOFError
        sock.sendall(bytes([_ACCEPTED]) + _derive(token, b"server", shared))
    except (OSError, EOFError):
        sock.close()
        return None
    _set_options(sock)
    keys = _derive(token, b"to node 0", shared), _derive(token, b"from node 0", shared)
    return Greeted(node, ROLES[role], SignedChannel(sock, keys[1], keys[0]))


def connect(address: tuple[str, int], token: bytes, node: int, role: str, seconds: float) -> SignedChannel:
    """Connect to node 0, which may come later, for at most ``seconds``. Raises RefusedError and ConnectionError."""
    until = time.monotonic() + seconds
    while True:
        try:
            return _connect(address, token, node, role)
        except (OSError, EOFError) as error:
            if time.monotonic() > until:
                raise ConnectionError(f"node 0 did not answer at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.5)


def _connect(address: tuple[str, int], token: bytes, node: int, role: str) -> SignedChannel:
    sock = socket.create_connection(address, timeout=_SECONDS)
    try:
        hello = _HELLO.pack(_GREETING, node, ROLES.index(role), secrets.token_bytes(_SIZE))
        sock.sendall(hello)
        shared = hello + _read(sock, _SIZE)
        sock.sendall(_derive(token, b"client", shared))
        answer = _read(sock, 1)[0]
        if answer == _WRONG_TOKEN:
            raise RefusedError(f"node 0 at {address[0]}:{address[1]} has another {TOKEN}: set the same on every node")
        if answer == _NOT_EXPECTED:
            raise EOFError(f"it does not wait for node {node}, or has it already")
        if not hmac.compare_digest(_read(sock, _SIZE), _derive(token, b"server", shared)):
            raise RefusedError(f"what answers at {address[0]}:{address[1]} does not know {TOKEN}")
    except BaseException:
        sock.close()
        raise
    _set_options(sock)
    keys = _derive(token, b"to node 0", shared), _derive(token, b"from node 0", shared)
    return SignedChannel(sock, keys[0], keys[1])


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data
