"""What a prediction brings: a file of 400 tokens written again with a name changed, with the old file as prediction.

    python -m benchmarks predicted       # half a minute on two cores

One server without speculation, one user, greedy, each way in turns. A small model edits badly but copies well, so the
prompt holds the file as it shall be and the prediction the file before: the answer differs from it wherever the name
stands.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.engines import Engine, serve_octavo
from benchmarks.peers.server import Server

MODEL = "smollm2-135m-instruct"
FILE = Path(__file__).parents[1] / "server/octavo/spec_decode/places.py"
CHARACTERS, OLD, NEW = 1_500, "position", "index"
OUTPUT_TOKENS = 400
ROUNDS = 5


def body(old: str, new: str, predicted: bool) -> dict[str, Any]:
    """A request whose answer has begun."""
    asked = f"Write this file again, word by word:\n```python\n{new}\n```"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"```python\n{new[:40]}"}]
    prediction = {"prediction": {"type": "content", "content": old[40:]}} if predicted else {}
    options = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "add_generation_prompt": False}
    return {"model": MODEL, "messages": messages, "continue_final_message": True, **options, **prediction}


def main() -> None:
    old = FILE.read_text()[:CHARACTERS]
    new = old.replace(OLD, NEW)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    answers, used = set[str](), dict[str, Any]()
    engine = Engine("Octavo", "plain", serve_octavo("--speculative-config", '{"method": "none"}'), model=MODEL)
    with Server(engine) as server, httpx.Client(timeout=120) as client:
        for at in range(ROUNDS + 1):
            for predicted in (at % 2 == 0, at % 2 != 0):
                started = time.perf_counter()
                address = f"http://127.0.0.1:{server.port}/v1/chat/completions"
                answer = client.post(address, json=body(old, new, predicted)).raise_for_status().json()
                if at:  # the first round warms up
                    seconds[predicted].append(time.perf_counter() - started)
                answers.add(answer["choices"][0]["message"]["content"])
                used = answer["usage"] if predicted else used
    ratios = [without / with_ for without, with_ in zip(seconds[False], seconds[True], strict=True)]
    without, with_ = (statistics.median(seconds[way]) for way in (False, True))
    print(f"without {without:.2f} s, with {with_:.2f} s: {statistics.median(ratios):.2f} times as fast", end=" ")
    print(f"({min(ratios):.2f} - {max(ratios):.2f}), {'one text' if len(answers) == 1 else 'OTHER TEXT'}; {used}")


if __name__ == "__main__":
    main()
