"""``octavo chat``: talk to a model in the terminal. Uses a running server, or starts one for the conversation."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper

import httpx

from octavo.cli.chat_client import Client, MessageRefusedError
from octavo.cli.chat_input import Lines, Reader, Terminal
from octavo.cli.conversation import Conversation, dim, is_command, number
from octavo.errors import ConfigError, OctavoError
from octavo.fetch.model_names import DEFAULT_MODEL, check_model_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo chat`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"Model to start a server for (default: {DEFAULT_MODEL}, the embedded model)",
    )  # fmt: skip
    parser.add_argument(
        "--url", help="Running server to talk to instead, as http://127.0.0.1:8000/v1 (default: a server is started)"
    )
    parser.add_argument(
        "--model-name", help="Name of the model to ask the server for (default: the first that it lists)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"),
        help="API key of the server (default: OPENAI_API_KEY of the environment, else none)",
    )  # fmt: skip
    parser.add_argument("--system-prompt", help="System prompt of the conversation (default: the chat template's)")
    parser.add_argument(
        "--max-tokens", type=int, help="Maximum number of tokens per answer (default: a quarter of the context)"
    )
    parser.add_argument(
        "--temperature", type=number,
        help="Temperature of sampling (default: what the model's files recommend, with top_p and the like; where they "
        "say nothing 0.7, with top_p 0.9 and min_p 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "-q", "--quick", metavar="MESSAGE",
        help="Send one message, print the answer and leave. Standard input that is no terminal is appended to it "
        "(default: a conversation)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="Print the speed of each answer (default: off)")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises OctavoError."""
    if args.url is None:
        check_model_name(args.model)
    elif args.model is not None and args.model_name is not None and args.model != args.model_name:
        raise ConfigError(f"two models are named, {args.model} and {args.model_name}: give one")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # undecodable input and unprintable output must not end the chat
    with contextlib.ExitStack() as stack:
        stack.enter_context(_exit_on_signals())
        url = args.url if args.url is not None else stack.enter_context(_own_server(args.model))
        client = stack.enter_context(Client(url, args.api_key))
        model = client.model(args.model_name or (args.model if args.url is not None else None))
        settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        conversation = Conversation(
            client,
            model,
            settings,
            args.system_prompt,
            args.verbose,
            _notice if args.quick is None else _print_to_stderr,
        )
        if args.quick is not None:
            return 0 if conversation.ask(_with_input(args.quick)) else 130
        if not sys.stdin.isatty():
            return _converse(conversation, Lines(sys.stdin))
        print(dim(f"{model.name}: /? for help, /bye or Ctrl-D to leave"))
        return _converse(conversation, Terminal())


def _converse(conversation: Conversation, reader: Reader) -> int:
    interrupted = False  # whether the last key was Ctrl-C at an empty line
    while True:
        try:
            message = reader.read()
        except KeyboardInterrupt:
            if not isinstance(reader, Terminal) or interrupted:
                raise
            interrupted = not reader.typed
            if interrupted:
                _notice("(Ctrl-C again, Ctrl-D or /bye to leave)")
            continue
        interrupted = False
        if message is None:
            return 0
        if is_command(message):
            if not conversation.command(message):
                return 0
        elif message.strip():
            try:
                if not conversation.ask(message) and not reader.interactive:
                    return 130
            except OctavoError as error:  # earlier turns stay; a person may wait for the server and try again
                if not reader.interactive and not isinstance(error, MessageRefusedError):
                    raise
                print(f"octavo: error: {error}", file=sys.stderr)


def _with_input(question: str) -> str:
    """The question, and what is piped in."""
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    return f"{question}\n\n{text}" if text else question


def _notice(text: str) -> None:
    print(dim(text), flush=True)


def _print_to_stderr(text: str) -> None:
    """Notices that must not end up in a redirected answer."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """A closed terminal window, or SIGTERM, ends the conversation and with it its server."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[str]:
    """Start `octavo serve` on a free port of the loopback interface; yields its URL.

    Exits with the server's status if it cannot start; the server has printed why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *([model] if model else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    try:
        if sys.stderr.isatty():
            print(f"starting {model or DEFAULT_MODEL} ...", file=sys.stderr)
        while True:
            if (code := process.poll()) is not None:
                if code > 0:
                    sys.exit(code)
                raise OctavoError(f"the server was killed by signal {-code} before it was ready (out of memory?)")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()
