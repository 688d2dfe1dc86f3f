"""``octavo chat``: talk to a model in the terminal. Uses a running server, or starts one for the conversation."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from octavo.errors import OctavoError

COMMANDS = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="start a server for this model (default: the embedded one)")
    parser.add_argument("--url", help="talk to this server instead, for example http://127.0.0.1:8000/v1")
    parser.add_argument("--model-name", help="name to ask the server for (default: the first that it lists)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="(or OPENAI_API_KEY)")
    parser.add_argument("--system-prompt", help="first message of the conversation")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer and leave")


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and earlier ones called up again)
    with contextlib.ExitStack() as stack:
        url = args.url.rstrip("/") if args.url else stack.enter_context(_own_server(args.model))
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=None, trust_env=False))
        return _converse(client, args)


def _first_model(client: httpx.Client) -> str:
    """The name of what the server serves. Raises OctavoError."""
    try:
        response = client.get("/models")
        if response.status_code == 404 and not client.base_url.path.rstrip("/").endswith("/v1"):
            client.base_url = client.base_url.join("v1")  # an address without the API's own part
            response = client.get("/models")
    except httpx.HTTPError as error:
        raise OctavoError(f"no server at {client.base_url}: {error}") from None
    if response.status_code != 200:
        raise OctavoError(f"the server at {client.base_url} answered {response.status_code}: {_reason(response)}")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise OctavoError(f"no OpenAI-compatible server at {client.base_url}: it lists no models") from None


def _reason(response: httpx.Response) -> str:
    """What an answer with an error says."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def _converse(client: httpx.Client, args: argparse.Namespace) -> int:
    name = args.model_name or _first_model(client)
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    body: dict[str, Any] = {"model": name, "stream": True} | {k: v for k, v in options.items() if v is not None}
    start = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    history = list(start)
    if args.quick is None and sys.stdin.isatty():
        print(f"{name}: {COMMANDS}")
    while True:
        message = args.quick if args.quick is not None else _read()
        if message is None or message.strip() == "/exit":
            return 0
        if message.strip() == "/reset":
            history = list(start)
        elif message.strip():
            history.append({"role": "user", "content": message})
            try:
                history.append({"role": "assistant", "content": _answer(client, body | {"messages": history})})
            except _Refused as error:
                if args.quick is not None:
                    raise
                del history[-1]  # what has been said before still stands
                print(f"octavo: {error}", file=sys.stderr)
        if args.quick is not None:
            return 0


class _Refused(OctavoError):
    """One message could not be answered; the conversation may go on."""


def _dim(thought: str) -> str:
    """What the model thinks, told from what it says."""
    return f"\x1b[2m{thought}\x1b[0m" if thought and sys.stdout.isatty() else thought


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """Print the answer as it comes. Ctrl-C closes the stream, which ends the request on the server."""
    text = ""
    try:
        with client.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _Refused(f"the server answered {response.status_code}: {_reason(response)}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    print()
                    raise _Refused(f"the answer broke off: {event['error'].get('message', event['error'])}")
                for choice in event["choices"]:
                    thought, piece = (choice["delta"].get(part) or "" for part in ("reasoning_content", "content"))
                    text += piece
                    print(_dim(thought) + piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    except httpx.HTTPError as error:
        raise OctavoError(f"the connection to {client.base_url} broke: {error}") from None
    print()
    return text


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[str]:
    """A server of our own on a free port of the loopback interface; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *([model] if model else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    try:
        while True:
            if process.poll() is not None:
                raise OctavoError("the server ended before it was ready; its last words are above")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()
