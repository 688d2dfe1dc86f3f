"""The announcement of a server that serves: where it is, and what can be done there."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from octavo.entrypoints.args import ServerArgs

_ALL_INTERFACES = ("0.0.0.0", "::")


def announcement(names: list[str], sock: socket.socket, args: ServerArgs, generates: bool) -> str:
    """Return the block at the end of the start, for people; one line for collectors of logs and for Unix sockets.

    ``generates``: the model answers, and does not only embed. The addresses are those for this machine, since that of
    all interfaces leads nowhere in some browsers.
    """
    first = f"serving {', '.join(names)} at {_listening(sock, args)}"
    if args.uds or args.log_format == "json":
        return first
    base = _local(sock, args) + args.root_path.rstrip("/")
    key = "OPENAI_API_KEY=... " if args.api_key else ""
    rows = {
        "page": f"{base}/" if generates else "",
        "API": f"{base}/v1 (OpenAI's; Anthropic's and Ollama's: {base})" if generates else f"{base}/v1",
        "chat": f"{key}{_program()} chat --url {base}/v1" if generates else "",
        "docs": "" if args.disable_fastapi_docs else f"{base}/docs",
    }
    lines = [first, *(f"  {name:<5} {what}" for name, what in rows.items() if what)]
    if sock.getsockname()[0] in _ALL_INTERFACES and not args.api_key:
        lines.append(
            "  whoever reaches this machine may use it: --api-key asks for a key, --host 127.0.0.1 lets in nobody else"
        )
    return "\n".join(lines)


def _program() -> str:
    """The command as people can type it where the server was started: a clone's is on nobody's path but make's."""
    program, here = Path.cwd() / sys.argv[0], Path.cwd()
    inside = program.name == "octavo" and program.is_relative_to(here)
    return str(program.relative_to(here)) if inside else "octavo"


def _listening(sock: socket.socket, args: ServerArgs) -> str:
    if args.uds:
        return args.uds
    host, port = sock.getsockname()[:2]
    return f"http{'s' if args.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def _local(sock: socket.socket, args: ServerArgs) -> str:
    return _listening(sock, args).replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
