"""Agents that call tools: long conversations of which nearly all was seen before, beside llama.cpp and vLLM.

    python -m benchmarks agents                     # 8 agents, 20 turns each, 8k to 32k tokens: hours on a CPU
    python -m benchmarks agents --quick             # 4 agents, 6 turns, 2k to 4k tokens
    python -m benchmarks agents --file qwen3-0.6b-q4_k_m --engines octavo,llama.cpp

Each agent sends its whole conversation again at every turn: the system message with its tools, which all agents share,
its task, its earlier calls and their results, as drawn from --seed. The answer is cut to 32 tokens and not used, so
that every engine sees the same requests; the call that follows in the conversation is the drawn one. A tool takes
some tenths of a second. Tokens that "could be hit" are the agent's last prompt, or the shared system message at its
first turn. Every engine has its own prefix cache on, room in it for all conversations, and serves alone. Results go to
benchmarks/results/agents.json; --page writes the tables into docs/performance.md (alone, with --engines "").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.peers.cpus import cpu_kind, load_results, save_results
from benchmarks.peers.engines import Engine, peers_folder
from benchmarks.peers.files import ENGINES, NAME, commit, engine_of
from benchmarks.peers.load import make_prompts
from benchmarks.peers.model_files import ModelFile, large_models, model_files
from benchmarks.peers.server import Server, ServerError
from benchmarks.sections import replace_section
from octavo.bench.client import read_result
from octavo.bench.http_client import Exchange, HTTPClient
from octavo.bench.report import percentile
from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "agents.json"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
ANSWER_TOKENS = 32
CALL_TOKENS = 48
TOOL_SECONDS = (0.1, 0.8)
GOALS = {"ttft_p50": 0.5, "ttft_p95": 0.7}  # ours over the better of the others
HIT_GOAL = 0.97

Message = dict[str, str]


@dataclass(frozen=True)
class Size:
    """So many agents, turns, and tokens of context at the first and the last turn."""

    agents: int
    turns: int
    first: int
    last: int

    @property
    def room(self) -> int:
        """Tokens that a server keeps for each agent."""
        return self.last + 1024

    def __str__(self) -> str:
        return f"{self.agents} agents, {self.turns} turns each, contexts of {self.first:,} to {self.last:,} tokens"


@dataclass(frozen=True)
class Turn:
    """One request of an agent, the seconds that its tool took before it, and the tokens of the prompt in common with
    all agents."""

    messages: tuple[Message, ...]
    tool_seconds: float
    shared: int


@dataclass(frozen=True)
class Answer:
    """Times in milliseconds. ``possible``: tokens of the prompt that the server had seen before."""

    first_turn: bool
    ttft: float
    seconds: float
    prompt: int
    cached: int
    possible: int
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Row:
    """What one engine did with the trace. Times in milliseconds; of all turns but the first of each agent."""

    engine: str
    ttft_p50: float
    ttft_p95: float
    first_ttft_p50: float
    tok_s: float
    hit_rate: float
    seconds: float
    pss_bytes: int
    errors: int
    error: str

    def __str__(self) -> str:
        text = (
            f"{self.engine:<10} first token p50 {self.ttft_p50:8.0f} ms, p95 {self.ttft_p95:8.0f} ms, first turns "
            f"{self.first_ttft_p50:8.0f} ms, {self.tok_s:6.1f} tok/s, hits {self.hit_rate:6.1%}, "
            f"{self.pss_bytes / 1e9:.2f} GB, {self.seconds:.0f} s"
        )
        return text + (f"   {self.errors} ERRORS: {self.error}" if self.errors else "")


def draw_trace(tokenizer: Tokenizer, size: Size, seed: int) -> list[list[Turn]]:
    """Draw the turns of every agent: half of the first context is the system message with its tools."""
    rng = random.Random(seed)
    system = make_prompts(tokenizer, 1, size.first // 2, seed)[0]
    shared = len(tokenizer.encode(system, add_special_tokens=False))
    result_tokens = max(16, (size.last - size.first) // max(1, size.turns - 1) - CALL_TOKENS)
    tasks = make_prompts(tokenizer, size.agents, size.first - size.first // 2, seed + 1)
    texts = make_prompts(tokenizer, 2 * size.agents * size.turns, 1, seed + 2)  # seeds of the names that are called
    agents = []
    for agent in range(size.agents):
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": tasks[agent]}]
        results = make_prompts(tokenizer, size.turns, result_tokens, seed + 10 + agent)
        turns = []
        for turn in range(size.turns):
            turns.append(Turn(tuple(messages), rng.uniform(*TOOL_SECONDS) if turn else 0.0, shared))
            arguments = {"path": f"src/{texts[agent * size.turns + turn].strip()}.py", "line": rng.randrange(999)}
            call = json.dumps({"name": "read_file", "arguments": arguments})
            messages += [
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                {"role": "user", "content": f"<tool_response>\n{results[turn]}\n</tool_response>"},
            ]
        agents.append(turns)
    return agents


def run_trace(server: Server, trace: list[list[Turn]], timeout: float) -> tuple[list[Answer], float]:
    """All agents at once, each waiting for its answer and its tool."""
    client = HTTPClient(f"http://127.0.0.1:{server.port}", {})

    async def agent(turns: list[Turn]) -> list[Answer]:
        answers: list[Answer] = []
        for turn in turns:
            await asyncio.sleep(turn.tool_seconds)
            body = {
                "model": NAME,
                "messages": list(turn.messages),
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,  # llama.cpp's word, and its default
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            exchange = await client.post("/v1/chat/completions", body)
            answers.append(answer_of(exchange, answers[-1].prompt if answers else turn.shared, not answers))
            if answers[-1].error:
                break
        return answers

    async def everybody() -> tuple[list[Answer], float]:
        started = time.perf_counter()
        async with asyncio.timeout(timeout):
            found = await asyncio.gather(*map(agent, trace))
        client.close()
        return [answer for some in found for answer in some], time.perf_counter() - started

    return uvloop.run(everybody())


def answer_of(exchange: Exchange, possible: int, first_turn: bool) -> Answer:
    result = read_result(exchange, 0, 0.0)
    return Answer(
        first_turn,
        1e3 * result.ttft,
        result.latency,
        result.prompt_len,
        cached_tokens(exchange.body),
        possible,
        result.output_tokens,
        result.error,
    )


def cached_tokens(body: bytes) -> int:
    """The number of prompt tokens that a stream's usage, or llama.cpp's own timings, call cached; 0 if neither does."""
    most = 0
    for line in body.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        most = max(most, details.get("cached_tokens") or 0, (event.get("timings") or {}).get("cache_n") or 0)
    return most


def summary(engine: str, answers: list[Answer], seconds: float, pss_bytes: int) -> Row:
    good = [answer for answer in answers if not answer.error]
    later = [answer for answer in good if not answer.first_turn] or good
    # The first agent that comes has nothing to share: the others' first turns come while it is computed.
    possible = sum(min(answer.possible, answer.prompt) for answer in later)
    hits = sum(min(answer.cached, answer.possible) for answer in later)
    bad = [answer.error for answer in answers if answer.error]
    return Row(
        engine,
        percentile([answer.ttft for answer in later], 50),
        percentile([answer.ttft for answer in later], 95),
        percentile([answer.ttft for answer in good if answer.first_turn], 50),
        sum(answer.tokens for answer in good) / seconds,
        hits / possible if possible else 0.0,
        seconds,
        pss_bytes,
        len(bad),
        bad[0] if bad else "",
    )


def agents_engine(name: str, file: ModelFile, root: Path, size: Size) -> Engine | None:
    """The engine as `peers/files` starts it, with room for every agent's whole conversation and its cache on."""
    room = size.room
    engine = engine_of(name, replace(file, long=room), root, long=True)
    if engine is None:
        return None
    if name == "llama.cpp":
        words = list(engine.command)
        words[words.index("-np") + 1], words[words.index("-c") + 1] = str(size.agents), str(room * size.agents)
        return replace(engine, command=tuple(words))
    if name == "vLLM":
        return replace(engine, command=(*engine.command, "--enable-prefix-caching", "--enable-prompt-tokens-details"))
    return replace(engine, command=(*engine.command, "--max-model-len", str(room)))


def with_cache_space(engine: Engine, file: ModelFile, size: Size) -> Engine:
    """vLLM with memory for all agents' conversations in its cache, in whole GiB; the others size their own."""
    if engine.name != "vLLM":
        return engine
    needed = size.agents * size.room * bytes_per_token(json.loads((file.path / "config.json").read_text()), file.dtype)
    return replace(engine, env=engine.env | {"VLLM_CPU_KVCACHE_SPACE": str(math.ceil(needed / (1 << 30)))})


def bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Of keys and values of all layers, each of which keeps every position, by the model's config.json."""
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_size
    return int(values * (4 if dtype == "float32" else 2))


def measure(engine: Engine, trace: list[list[Turn]], timeout: float) -> Row:
    try:
        with Server(engine, timeout=900) as server:
            answers, seconds = run_trace(server, trace, timeout)
            return summary(engine.name, answers, seconds, server.pss_bytes())
    except (ServerError, TimeoutError, OSError, ValueError) as error:
        return Row(engine.name, 0, 0, 0, 0, 0, 0, 0, 1, f"{type(error).__name__}: {error}")


def verdicts(rows: list[Row]) -> list[str]:
    """Our hits, and our times beside the better of the others', where both served."""
    ours = next((row for row in rows if row.engine == "Octavo" and not row.errors), None)
    if ours is None:
        return []
    lines = [f"hits: {ours.hit_rate:.1%}, goal {HIT_GOAL:.0%}: {'met' if ours.hit_rate >= HIT_GOAL else 'MISSED'}"]
    for name, ratio in ratios(rows):
        goal = GOALS[name]
        lines.append(f"{name}: {ratio:.2f}x of the better, goal {goal}x: {'met' if ratio <= goal else 'MISSED'}")
    return lines


def ratios(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Each figure that has a goal, and our time over the better of the others', where both served."""
    ours = next((row for row in rows if row.engine == "Octavo" and not row.errors), None)
    others = [row for row in rows if row.engine != "Octavo" and not row.errors]
    if ours is not None and others:
        for name in GOALS:
            yield name, getattr(ours, name) / min(getattr(row, name) for row in others)


def page(cpus: dict[str, Any]) -> str:
    """The tables of docs/performance.md, one for each processor, file and size of a trace."""
    lines = []
    for kind, cells in cpus.items():
        traces: dict[tuple[str, Size], list[dict[str, Any]]] = {}
        for cell in cells.values():
            traces.setdefault((cell["title"], Size(**cell["size"])), []).append(cell)
        for (title, size), some in traces.items():
            days = sorted({cell["date"][:10] for cell in some})
            lines += [f"{kind}, {' and '.join(days)}, {title}: {size}.", "", *table(some), ""]
    return "\n".join(lines) or "Not measured yet."


def table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Every engine's row of one trace, and ours over the better of the others'."""
    rows = [Row(**{field.name: cell[field.name] for field in fields(Row)}) for cell in cells]
    yield "| | first token, median | 95th percentile | of first turns | tok/s | hits | memory |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        if row.errors:
            yield f"| {row.engine} | {row.errors} errors: {row.error[:120].replace('|', ';')} | | | | | |"
            continue
        times = " | ".join(f"{ms / 1e3:,.2f} s" for ms in (row.ttft_p50, row.ttft_p95, row.first_ttft_p50))
        rest = f"{row.tok_s:.1f} | {row.hit_rate:.1%} | {row.pss_bytes / 1e9:.2f} GB"
        yield f"| {row.engine} | {times} | {rest} |"
    if over := dict(ratios(rows)):
        yield f"| Octavo over the better of the others | {over['ttft_p50']:.2f} | {over['ttft_p95']:.2f} | | | | |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    root = peers_folder()
    files = {file.name: file for file in (*model_files(root), *large_models(root))}
    parser.add_argument("--quick", action="store_true", help="4 agents, 6 turns, 2k to 4k tokens, of SmolLM2")
    parser.add_argument("--file", choices=sorted(files), help="(default: llama-1b-q4_k_m; with --quick q4_k_m)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma separated (default: %(default)s)")
    parser.add_argument("--agents", type=int, help="(default: 8)")
    parser.add_argument("--turns", type=int, help="(default: 20)")
    parser.add_argument("--context", type=int, nargs=2, metavar=("FIRST", "LAST"), help="tokens (default: 8192 32768)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3 * 3600, help="seconds an engine (default: %(default)g)")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/performance.md")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args()
    size = Size(4, 6, 2048, 4096) if args.quick else Size(8, 20, 8192, 32768)
    first, last = args.context or (size.first, size.last)
    size = Size(args.agents or size.agents, args.turns or size.turns, first, last)
    wanted = {name.strip().lower() for name in args.engines.split(",") if name.strip()}
    if unknown := wanted - {name.lower() for name in ENGINES}:
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    file = files[args.file or ("q4_k_m" if args.quick else "llama-1b-q4_k_m")]
    trace = draw_trace(Tokenizer.from_files(resolve_model(None, progress=False)), size, args.seed)
    print(f"{cpu_kind()}\n{file.title}: {size}", flush=True)
    rows = []
    for name in ENGINES:
        engine = agents_engine(name, file, root, size) if name.lower() in wanted else None
        if engine is None:
            continue
        if problem := engine.missing():
            print(f"{name:<10} {problem}")
            continue
        needed = file.gguf if name == "llama.cpp" and not file.is_gguf and file.gguf else file
        needed.ensure()
        rows.append(measure(with_cache_space(engine, file, size), trace, args.timeout))
        print(rows[-1], flush=True)
    print(*verdicts(rows), sep="\n")
    results = load_results(args.output)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "size": asdict(size)}
    about["title"] = file.title
    for row in rows:
        results["cpus"].setdefault(cpu_kind(), {})[f"{file.name}/{row.engine}"] = about | asdict(row)
    save_results(args.output, results)
    if args.page:
        replace_section(PAGE, "agents", page(results["cpus"]))
    return 1 if any(row.errors for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
