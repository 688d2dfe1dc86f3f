"""The sockets on which the API listens. Light to import: whether a port is taken is found out before anything else."""

from __future__ import annotations

import socket

from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError


def check_ports(args: ServerArgs) -> None:
    """Raises ConfigError for a port that is taken now, before a model is fetched for it."""
    if not args.uds:
        _bind_tcp(args.host, args.port, "port").close()
    if args.management_port is not None:
        _bind_tcp(args.management_host or args.host, args.management_port, "management_port").close()


def bind(args: ServerArgs) -> list[socket.socket]:
    """Listening sockets of the main port and, if set, of the management port. Raises ConfigError if one is taken."""
    sockets = [_bind_unix(args.uds) if args.uds else _bind_tcp(args.host, args.port, "port")]
    if args.management_port is not None:
        sockets.append(_bind_tcp(args.management_host or args.host, args.management_port, "management_port"))
    return sockets


def _bind_tcp(host: str, port: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by every connection
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another {name}"
        ) from None
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on the unix socket {path} ({error.strerror}); remove it or choose another uds"
        ) from None
    return sock
