"""`octavo plan` for the page: by the command itself, so that both say the same; and what it prints, as HTML.

It imports no Gradio.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from octavo.dashboard.block_map import ledger_html
from octavo.errors import ConfigError, OctavoError
from octavo.fetch.description import short_count
from octavo.memory.ledger import gib

_TIMEOUT = 120.0  # seconds: the headers of a large model's files are fetched
_IDLE_SECONDS = 300  # after which the process ends: for some models it has imported torch
# A line of JSON with a command line comes in, and one with what is printed in each form goes out.
_PLANNER = f"""
import contextlib, io, json, signal, sys
from octavo.system.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
from octavo.cli.main import main

def said(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["plan", *words])
        except SystemExit:
            pass
    return out.getvalue(), err.getvalue()

while True:
    signal.alarm({_IDLE_SECONDS})
    line = sys.stdin.readline()
    signal.alarm(0)
    if not line:
        break
    words = json.loads(line)
    forms = [said([*words, "--json"])]
    if forms[0][0]:
        forms += [said([*words, form]) for form in ("--explain", "--yaml")]
    print(json.dumps(forms), flush=True)
"""


@dataclass(frozen=True)
class Planned:
    """The output of `octavo plan`."""

    said: dict[str, Any]  # --json
    text: str  # --explain
    yaml: str  # --yaml, or why there is none


def plan_words(model: str, **flags: str | float | None) -> list[str]:
    """The command line of `octavo plan`; flags without a value are left out. Raises ConfigError."""
    model = (model or "").strip()
    if not model or model.startswith("-"):
        raise ConfigError("Model must be a name, as org/name, a folder or a file")
    given = {name.replace("_", "-"): str(value).strip() for name, value in flags.items() if value is not None}
    return [model, *(f"--{name}={value}" for name, value in given.items() if value)]


class Planner:
    """A process that has imported what plans need: the first takes seconds, the next ones milliseconds."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def plan(self, words: Sequence[str]) -> Planned:
        """``words``: those of `plan_words`. Raises OctavoError with what the command says."""
        async with self._turn:
            line = await self._ask(words) or await self._ask(words)  # it may just have ended
        if not line:
            raise OctavoError("octavo plan ended without a word: see what the dashboard has printed")
        found = json.loads(line)
        if len(found) == 1:
            raise OctavoError(_last_error(found[0][1]))
        (as_json, _), (text, _), (yaml, problem) = found
        return Planned(json.loads(as_json), text, yaml or f"# {_last_error(problem)}")

    async def _ask(self, words: Sequence[str]) -> bytes:
        """The line that it answers, empty where it has ended. Raises OctavoError if it takes too long."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _PLANNER,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        answered = False
        try:
            async with asyncio.timeout(_TIMEOUT):
                process.stdin.write(json.dumps(list(words)).encode() + b"\n")
                line = await process.stdout.readline()
                answered = bool(line)
                return line
        except ConnectionError:
            return b""
        except TimeoutError:
            raise OctavoError(f"octavo plan took more than {_TIMEOUT:.0f} s") from None
        finally:
            if not answered:  # also where nobody waits for the answer any more: it would be taken for the next one
                if process.returncode is None:
                    process.kill()
                self._process = None


def _last_error(said: str) -> str:
    lines = said.strip().splitlines() or ["octavo plan said nothing and ended"]
    return lines[-1].removeprefix("octavo: error: ")


def plan_html(said: dict[str, Any]) -> str:
    """Render whether the model fits, the memory as a bar, the capacity, and suggested changes."""
    verdict = "Fits" if said["fits"] else "Will not start"
    lines = "".join(f"<li>{escape(text)}</li>" for text in said["reasons"])
    changes = "".join(f"<li>{escape(one['text'])}</li>" for one in said["suggestions"])
    return (
        f'<h3 class="octavo-verdict {"ready" if said["fits"] else "failed"}">{verdict}: {escape(said["device"])}</h3>'
        + (f"<ul>{lines}</ul>" if lines else "")
        + (ledger_html(_shares(said)) if said["fits"] else "")
        + _cards(said)
        + (f"<h3>What to change</h3><ul>{changes}</ul>" if changes else "")
    )


def _shares(said: dict[str, Any]) -> dict[str, int]:
    shares = {"weights": said["weights_bytes"], **said["other_bytes"], "KV cache": said["kv_cache_bytes"]}
    return {**shares, "unused": max(0, said["memory_bytes"] - sum(shares.values()))}


def _cards(said: dict[str, Any]) -> str:
    weights = f"{short_count(said['parameters'])} parameters, {said['weight_dtype']}"
    cards = [("Weights", gib(said["weights_bytes"]), weights)]
    if said["kv_bytes_per_token"]:
        cards.append(("KV cache of a token", f"{said['kv_bytes_per_token']:,} bytes", said["kv_cache_dtype"]))
    if said["kv_cache_bytes"]:
        blocks = f"{said['num_blocks']:,} blocks of {said['block_size']} tokens"
        cards.append(("KV cache", gib(said["kv_cache_bytes"]), blocks))
        longest = f"sequences of {said['max_model_len']:,} tokens; at most {said['max_num_seqs']:,} run at a time"
        cards.append(("Holds", f"{said['max_concurrency']:,.1f}", longest))
    if seen := said.get("workload"):
        at_a_time = said["max_num_seqs"] * said["data_parallel_size"]
        held = f"{seen['capacity']:,} if all are at their longest"
        if seen["mean_capacity"] > at_a_time:
            held += f"; {at_a_time:,} run at a time, the others wait"
        how = "calibrated" if seen["calibrated"] else "not calibrated"
        cards += [
            ("Users that the cache holds", f"{seen['mean_capacity']:,}", held),
            ("Speed", f"{seen['tokens_per_second']:,.0f} tok/s", f"of {seen['users']:,.0f} users, {how}"),
            ("Time to first token", f"{seen['ttft_ms']:,.0f} ms", how),
            ("Between tokens", f"{seen['itl_ms']:,.1f} ms", how),
            ("Advice", f"--max-num-seqs {seen['max_num_seqs']}", "for these users and times"),
        ]
    items = (f"<div><dt>{name}</dt><dd>{value}<small>{escape(more)}</small></dd></div>" for name, value, more in cards)
    return f'<dl class="octavo-cards">{"".join(items)}</dl>'
