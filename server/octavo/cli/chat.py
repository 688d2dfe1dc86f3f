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
    with contextlib.ExitStack() as stack:
        url = args.url.rstrip("/") if args.url else stack.enter_context(_own_server(args.model))
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=None, trust_env=False))
        return _converse(client, args)


def _converse(client: httpx.Client, args: argparse.Namespace) -> int:
    try:
        name = args.model_name or client.get("/models").raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise OctavoError(f"no OpenAI-compatible server at {client.base_url}: {error}") from None
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
            history.append({"role": "assistant", "content": _answer(client, body | {"messages": history})})
        if args.quick is not None:
            return 0


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
                raise OctavoError(f"the server answered {response.status_code}: {response.text[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise OctavoError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    text += piece
                    print(piece, end="", flush=True)
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
