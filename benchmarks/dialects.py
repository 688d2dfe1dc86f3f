"""What a streamed token costs the API process in each dialect, beside chat completions.

    python -m benchmarks dialects [--concurrency 32] [--tokens 400] [--rounds 9]

The same conversation in every dialect, in turn, on a tiny model with made-up weights. CPU time of the API process's
event loop, the least of all rounds: other processes add to it, none takes from it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.api_overhead import Client, serving, write_model

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SAMPLING = {"temperature": 1, "seed": 7}  # the same tokens in all; the likeliest are always the same, maybe spaces
SHARED: dict[str, Any] = {**SAMPLING, "stream": True}


def bodies(tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each dialect."""
    messages = {"messages": MESSAGES, **SHARED}
    options = {"num_predict": tokens, **SAMPLING}
    response = {"input": MESSAGES, "max_output_tokens": tokens, **SHARED}
    return {
        "chat completions": ("/v1/chat/completions", {**messages, "max_tokens": tokens}),
        "completions": ("/v1/completions", {"prompt": QUESTION, "max_tokens": tokens, **SHARED}),
        "Messages": ("/v1/messages", {**messages, "max_tokens": tokens}),
        "Responses": ("/v1/responses", {**response, "store": False}),
        "Responses, stored": ("/v1/responses", response),
        "Ollama's chat": ("/api/chat", {"messages": MESSAGES, "options": options}),
        "Ollama's generate": ("/api/generate", {"prompt": QUESTION, "options": options}),
    }


class DialectClient(Client):
    """Sends one request over and over."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(port, 0)
        self._request = path, body

    def request(self) -> tuple[str, dict[str, Any]]:
        return self._request

    def is_whole(self, answer: bytes) -> bool:
        return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n0\r\n\r\n") and b'"error":{' not in answer


def loop_seconds(pid: int) -> float:
    """CPU time of the process's main thread, in which its event loop runs; finer than the ticks of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), max_len=options.tokens + 256)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        with serving(folder, options.concurrency) as (pid, port):
            clients = {name: DialectClient(port, *asked) for name, asked in bodies(options.tokens).items()}
            seconds: dict[str, list[float]] = {name: [] for name in clients}
            for number in range(options.rounds + 1):
                for name in list(clients) if number % 2 else list(clients)[::-1]:
                    before = loop_seconds(pid)
                    clients[name].round(options.concurrency)
                    if number:  # the first warms up
                        seconds[name].append(loop_seconds(pid) - before)
    base = min(seconds["chat completions"])
    for name, found in seconds.items():
        token = min(found) / options.concurrency / options.tokens
        print(f"{name:<18} {1e6 * token:5.1f} us a token, {min(found) / base:.2f} x chat completions")


if __name__ == "__main__":
    main()
