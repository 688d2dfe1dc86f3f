"""What strict tools cost where the model is free to call: 20 streams that write text, their tools strict and not.

    python -m benchmarks strict_tools    # a minute on two cores

One server, greedy, each way in turns. The model calls nothing: the grammar that looks out for calls is measured.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.peers.engines import Engine, serve_octavo
from benchmarks.peers.server import Server

MODEL = "smollm2-135m-instruct"
STREAMS, OUTPUT_TOKENS, ROUNDS = 20, 128, 11
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def body(stream: int, strict: bool) -> dict[str, Any]:
    """A request of a user of his own."""
    functions = [
        {"name": name, "description": name, "parameters": PATH, "strict": strict} for name in ("read", "list", "remove")
    ]
    asked = f"Tell me a long story about {stream} rivers. Call nothing."
    options = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    tools = [{"type": "function", "function": function} for function in functions]
    return {"model": MODEL, "messages": [{"role": "user", "content": asked}], "tools": tools, **options}


def main() -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    engine = Engine("Octavo", "plain", serve_octavo(), model=MODEL)
    with Server(engine) as server, httpx.Client(timeout=300) as client, ThreadPoolExecutor(STREAMS) as pool:
        address = f"http://127.0.0.1:{server.port}/v1/chat/completions"

        def answer(asked: dict[str, Any]) -> None:
            message = client.post(address, json=asked).raise_for_status().json()["choices"][0]["message"]
            assert not message.get("tool_calls"), message

        for at in range(ROUNDS + 1):
            for strict in (at % 2 == 0, at % 2 != 0):
                started = time.perf_counter()
                list(pool.map(answer, [body(stream, strict) for stream in range(STREAMS)]))
                if at:  # the first round warms up
                    seconds[strict].append(time.perf_counter() - started)
    ratios = [strict / free - 1 for free, strict in zip(seconds[False], seconds[True], strict=True)]
    rate = STREAMS * OUTPUT_TOKENS / statistics.median(seconds[False])
    print(f"{rate:.0f} tokens/s without; strict tools cost {statistics.median(ratios):.1%}", end=" ")
    print(f"({min(ratios):.1%} - {max(ratios):.1%})")


if __name__ == "__main__":
    main()
