"""Connections between the nodes of an engine: TLS 1.3 over TCP, on which each side proves that it knows the group's
token (`octavo.executor.group_certificate`).

After TLS's handshake the side that connects names its node and what the connection is for, and the other answers
whether it expects that.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.executor.group_certificate import tls_contexts
from octavo.system.channel import Channel

TOKEN = "OCTAVO_CLUSTER_TOKEN"
ROLES = ("control", "tensors", "beats")  # what connections are for; each node makes one of each
_HELLO = struct.Struct("=IB")  # node, role
_SECONDS = 5.0  # for a handshake
_READ_BYTES = 1 << 18
_RECORD = struct.Struct(">BHH")  # of TLS, RFC 8446 5.1: kind, version, bytes that follow
_RECORD_KINDS, _MAX_RECORD = range(20, 24), (1 << 14) + 256
_EXPECTED, _NOT_EXPECTED = b"\0", b"\1"


class RefusedError(ConfigError):
    """The other side does not take this one."""


def cluster_token() -> bytes:
    """Return the group's token. Raises ConfigError where there is none."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise ConfigError(f"{TOKEN} is not set: an engine of several nodes needs it, the same on each")
    return token.encode()


@dataclass(frozen=True)
class Greeted:
    """A node that has connected, and what for."""

    node: int
    role: str
    channel: TlsChannel


class _Tls:
    """One end of TLS apart from its socket, so that one thread may send while another receives."""

    def __init__(self, context: ssl.SSLContext, *, accepts: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._lock = threading.Lock()

    def encrypt(self, data: bytes | bytearray) -> bytes:
        with self._lock:
            if data:
                self._tls.write(data)
            return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return what ``data`` and what came before complete. Raises ssl.SSLError for what the other side did not send
        so: changed, repeated or left out."""
        with self._lock:
            self._incoming.write(data)
            whole = []
            try:
                while part := self._tls.read(_READ_BYTES):
                    whole.append(part)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):  # the latter: the socket's end follows
                pass
            return b"".join(whole)

    def shake_hands(self, sock: socket.socket) -> None:
        """Raises OSError, of which ssl.SSLError is one, and EOFError."""
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                sock.sendall(self._outgoing.read())
                self._incoming.write(_record(sock))
            finally:
                sock.sendall(self._outgoing.read())  # after a failure the alert, by which the other side learns why


class TlsChannel(Channel):
    """A `Channel` over TLS."""

    def __init__(self, sock: socket.socket, tls: _Tls) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(sock)
        self._tls = tls

    def send_frame(self, data: bytes) -> None:
        """See `Channel`."""
        super().send_frame(self._tls.encrypt(data))

    def _decode(self, data: bytes) -> bytes:
        try:
            return self._tls.decrypt(data)
        except ssl.SSLError as error:
            raise EOFError("a frame is not authentic") from error


def accept(sock: socket.socket, token: bytes, expected: set[tuple[int, str]]) -> Greeted | None:
    """Take the connection of a node; None, and it is closed, if the handshake does not end well. ``expected``: nodes
    and roles that are still wanted."""
    try:
        sock.settimeout(_SECONDS)
        tls = _Tls(tls_contexts(token)[0], accepts=True)
        tls.shake_hands(sock)
        node, role = _HELLO.unpack(tls.decrypt(_record(sock)))
        is_expected = role < len(ROLES) and (node, ROLES[role]) in expected
        sock.sendall(tls.encrypt(_EXPECTED if is_expected else _NOT_EXPECTED))
        if not is_expected:
            raise EOFError
    except (OSError, EOFError, struct.error):
        sock.close()
        return None
    return Greeted(node, ROLES[role], TlsChannel(sock, tls))


def connect(address: tuple[str, int], token: bytes, node: int, role: str, seconds: float) -> TlsChannel:
    """Connect to node 0, which may come later, for at most ``seconds``. Raises RefusedError and ConnectionError."""
    until = time.monotonic() + seconds
    while True:
        try:
            return _connect(address, token, node, role)
        except (OSError, EOFError) as error:
            if time.monotonic() > until:
                raise ConnectionError(f"node 0 did not answer at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.5)


def _connect(address: tuple[str, int], token: bytes, node: int, role: str) -> TlsChannel:
    sock = socket.create_connection(address, timeout=_SECONDS)
    try:
        tls = _Tls(tls_contexts(token)[1], accepts=False)
        try:
            tls.shake_hands(sock)
        except ssl.SSLCertVerificationError:
            raise RefusedError(
                f"node 0 at {address[0]}:{address[1]} has another {TOKEN}: set the same on every node"
            ) from None
        sock.sendall(tls.encrypt(_HELLO.pack(node, ROLES.index(role))))
        if tls.decrypt(_record(sock)) != _EXPECTED:
            raise EOFError(f"it does not wait for node {node}, or has it already")
    except BaseException:
        sock.close()
        raise
    return TlsChannel(sock, tls)


def _record(sock: socket.socket) -> bytes:
    """Read one record of TLS and not a byte of the next: what follows a handshake is for the channel."""
    head = _read(sock, _RECORD.size)
    kind, _, size = _RECORD.unpack(head)
    if kind not in _RECORD_KINDS or size > _MAX_RECORD:
        raise EOFError("it does not speak TLS")
    return head + _read(sock, size)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data
