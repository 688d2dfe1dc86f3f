"""The dashboard's own HTTP server, and the server that it starts."""

from __future__ import annotations

import gc
import logging
import socket

from octavo.dashboard.content_policy import with_policy
from octavo.dashboard.same_origin import is_loopback
from octavo.dashboard.session import Session
from octavo.errors import ConfigError
from octavo.system.signals import exit_on_signals


def serve(session: Session, host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM; prints the address when it answers. Raises OctavoError."""
    with bind(host, port) as sock, exit_on_signals():
        session.start()
        try:
            _serve(session, sock, is_loopback(host))
        finally:
            session.stop()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}; give --port") from None
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address to open in a browser on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _serve(session: Session, sock: socket.socket, local: bool) -> None:
    from octavo.dashboard.gradio_import import import_gradio

    gc.disable()  # nothing of what is imported and built is garbage
    import_gradio()
    import uvicorn

    from octavo.dashboard.page import make_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"dashboard at {address_of(sock)}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # streams of open pages are cut off
            await super().shutdown(sockets)

    app = with_policy(make_app(session), local)
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, ws="none")
    Server(config).run(sockets=[sock])
