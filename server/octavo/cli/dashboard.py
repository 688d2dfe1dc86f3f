"""``octavo dashboard``: a page to chat with a model, compare and measure it. Uses a running server, or starts one."""

from __future__ import annotations

import argparse
import importlib.util
import os

from octavo.errors import ConfigError
from octavo.fetch.model_names import DEFAULT_MODEL, check_model_name
from octavo.flags.fields import parse_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo dashboard`."""
    parser.usage = "%(prog)s [MODEL] [flags] [-- flags of octavo serve]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"Model to start a server for (default: {DEFAULT_MODEL}, the embedded model)",
    )
    parser.add_argument(
        "--url", help="URL of a running server to show, as http://127.0.0.1:8000/v1 (default: a server is started)"
    )
    parser.add_argument(
        "--management-url",
        help="Management port of the server at --url, as http://127.0.0.1:8001, for the tab Memory (default: none)",
    )
    parser.add_argument("--model-name", help="Model name in requests (default: the first that the server lists)")
    parser.add_argument(
        "--api-key",
        type=str.strip,
        metavar="KEY",
        default=os.environ.get("OCTAVO_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        help="API key of the server. It is used for all visitors if only this machine can open the page; otherwise "
        "each visitor must enter it "
        "(default: OCTAVO_API_KEY or OPENAI_API_KEY of the environment, else visitors are asked)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=parse_int, default=7860, help="Port to listen on; 0: any free one (default: 7860)"
    )
    parser.add_argument("serve_args", nargs="*", help="Flags of `octavo serve` for the started server, after --")


def run(args: argparse.Namespace) -> int:
    """Serve the page until told to stop. Raises OctavoError."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {args.port}")
    if args.model and args.model.startswith("-"):  # of what is after --
        args.model, args.serve_args = None, [args.model, *args.serve_args]
    if args.url is None:
        if args.management_url is not None:
            raise ConfigError("--management-url belongs to a server at --url: the one that is started has its own")
        check_model_name(args.model)
    for flag, url in (("--url", args.url), ("--management-url", args.management_url)):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{flag} must be an address such as http://127.0.0.1:8000, got {url!r}")
    if args.url is not None and args.serve_args:
        raise ConfigError("--url looks at a server that runs: flags after -- would start another")
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError("the dashboard needs Gradio: pip install 'octavo[dashboard]'")
    from octavo.dashboard.app import serve
    from octavo.dashboard.same_origin import is_loopback
    from octavo.dashboard.session import Session

    flags = [*([args.model] if args.model else []), *args.serve_args]
    name = args.model_name or (args.model if args.url is not None else None)
    session = Session(flags, args.url, args.management_url, name, args.api_key, local=is_loopback(args.host))
    serve(session, args.host, args.port)
    return 0
