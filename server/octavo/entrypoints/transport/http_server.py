"""uvicorn as this project runs it: with `LimitedHttpProtocol`, TLS on the main port, and a quiet log."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.transport.http11 import LimitedHttpProtocol
from octavo.errors import ConfigError

FLUSH_SECONDS = 3  # for responses of aborted requests, after the drain
_KEEP_ALIVE_SECONDS = 75  # longer than the idle time of common proxies, so that they close first
_QUIET_PATHS = ("/health", "/livez", "/readyz", "/ping", "/metrics", "/load")


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: whoever runs it decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all handlers as they are."""
        yield


def make_http_server(app: Starlette, args: ServerArgs, main: bool) -> HttpServer:
    """A server for the ``main`` port or for the management port. Raises ConfigError for a bad certificate."""
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=None,
        access_log=not args.disable_access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        backlog=2048,
    )
    if main and args.ssl_certfile:
        config.ssl_keyfile, config.ssl_certfile = args.ssl_keyfile, args.ssl_certfile
        config.ssl_ca_certs, config.ssl_cert_reqs = args.ssl_ca_certs, args.ssl_cert_reqs
    try:
        config.load()
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"cannot use ssl_certfile {args.ssl_certfile!r} with its key: {error}") from None
    return HttpServer(config)


def quiet_access_log() -> None:
    """Leave probes and monitors out of the access log, and uvicorn's own messages below warnings."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    args = record.args
    return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0].endswith(_QUIET_PATHS))
