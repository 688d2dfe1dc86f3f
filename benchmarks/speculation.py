"""What speculation brings: one user's decode rate and many users' throughput, with and without, in turns.

    python -m benchmarks speculation                          # ours, about 8 minutes on two cores
    python -m benchmarks speculation --peers                  # and llama.cpp and vLLM with their n-gram modes, one user
    python -m benchmarks speculation --suffix --users 1       # with guesses from recent answers

Both of our servers run all the time, and every round asks one of them and then the other for the same answers, so that
a machine that turns slower slows both. Greedy chat on texts of the tree (`speculation_prompts.py`). The decode rate of
a stream is (tokens - 1) / (last event - first event). Where recent answers are learnt from, each round has a
``cache_salt`` of its own, over all workloads: no question is known, but what was answered to others is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.peers.engines import Engine, all_engines, peers_folder, serve_octavo
from benchmarks.peers.server import Bystanders, Server
from benchmarks.speculation_prompts import WORKLOADS
from octavo.bench.client import RequestResult, make_body, read_result
from octavo.bench.datasets import SampleRequest
from octavo.bench.http_client import HTTPClient

NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7}
OUTPUT_TOKENS = 100
ROUNDS = 3
# With one user, of speculation over none; with more, of all tokens a second.
GOALS = {"summary": 1.4, "RAG": 1.4, "editing": 1.3, "chat": 1.1, "chats": 1.1}
MANY_USERS_GOAL = 0.97
PEERS_GOAL = 2.0
VLLM_NGRAM = ("--speculative-config", json.dumps(NGRAM))
LLAMA_NGRAM = ("--spec-type", "ngram-simple")


@dataclass
class Row:
    """One workload of so many users, both ways; ratios of with over without."""

    workload: str
    users: int
    plain: float  # tokens a second: of a stream with one user, of all with more
    speculative: float
    ratio: float  # the median of the rounds'
    lowest: float
    highest: float
    goal: float
    same_text: bool
    errors: int

    def __str__(self) -> str:
        verdict = "met" if self.ratio >= self.goal else "MISSED"
        notes = ("" if self.same_text else "  OTHER TEXT") + (f"  {self.errors} errors" if self.errors else "")
        return (
            f"{self.workload:<10}{self.users:>6}{self.plain:>10.1f}{self.speculative:>10.1f}{self.ratio:>8.2f}"
            f"   ({self.lowest:.2f} - {self.highest:.2f})  >= {self.goal:g} {verdict}{notes}"
        )


def ask(server: Server, prompts: Sequence[str], users: int, salt: str = "") -> tuple[float, list[str], int]:
    """Tokens a second, the answers, and how many failed."""
    client = HTTPClient(f"http://127.0.0.1:{server.port}", {})
    options = {"temperature": 0} | ({"cache_salt": salt} if salt else {})

    async def user(mine: Sequence[tuple[int, str]]) -> list[tuple[int, RequestResult]]:
        done = []
        for i, prompt in mine:
            body = make_body(SampleRequest(prompt, [], OUTPUT_TOKENS), server.engine.model, True, options)
            done.append((i, read_result(await client.post("/v1/chat/completions", body), 0, 0.0)))
        return done

    async def everybody() -> list[tuple[int, RequestResult]]:
        shares = (list(enumerate(prompts))[i::users] for i in range(users))
        answers = await asyncio.gather(*(user(share) for share in shares))
        client.close()
        return sorted((pair for some in answers for pair in some), key=lambda pair: pair[0])

    started = time.perf_counter()
    results = [result for _, result in uvloop.run(everybody())]
    seconds = time.perf_counter() - started
    good = [r for r in results if not r.error and r.output_tokens > 1]
    if not good:
        raise SystemExit(f"{server.engine.label}: no answer: {results[0].error}")
    if users == 1:
        rate = sum(r.output_tokens - 1 for r in good) / sum(r.latency - r.ttft for r in good)
    else:
        rate = sum(r.output_tokens for r in good) / seconds
    return rate, [r.text for r in results], len(results) - len(good)


def prompts_of(workload: str, users: int) -> list[str]:
    """With many users each asks twice; what is asked again differs in its first words, so that no prefix is shared."""
    texts = WORKLOADS[workload]
    count = len(texts) if users == 1 else max(2 * users, len(texts))
    return [texts[i % len(texts)] if i < len(texts) else f"({i}) {texts[i % len(texts)]}" for i in range(count)]


def compare(plain: Server, speculative: Server, workload: str, users: int, rounds: int, salted: bool) -> Row:
    """The two in turns, the first one changing from round to round."""
    prompts = prompts_of(workload, users)
    rates: dict[str, list[float]] = {plain.engine.variant: [], speculative.engine.variant: []}
    texts: dict[str, list[str]] = {}
    errors = 0
    for at in range(rounds):
        for server in (plain, speculative) if at % 2 == 0 else (speculative, plain):
            rate, answers, failed = ask(server, prompts, users, f"{users} {at}" if salted else "")
            rates[server.engine.variant].append(rate)
            texts[server.engine.variant] = answers
            errors += failed
    without, with_ = rates[plain.engine.variant], rates[speculative.engine.variant]
    ratios = [b / a for a, b in zip(without, with_, strict=True)]
    return Row(
        workload,
        users,
        statistics.median(without),
        statistics.median(with_),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        GOALS[workload] if users == 1 else MANY_USERS_GOAL,
        texts[plain.engine.variant] == texts[speculative.engine.variant],
        errors,
    )


def ours(config: dict[str, object], flags: Sequence[str]) -> tuple[Engine, Engine]:
    """Our server without and with speculation."""
    model = "smollm2-135m-instruct"
    return (
        Engine("Octavo", "plain", serve_octavo(*flags, "--speculative-config", '{"method": "none"}'), model=model),
        Engine("Octavo", "speculative", serve_octavo(*flags, "--speculative-config", json.dumps(config)), model=model),
    )


def peers() -> list[Engine]:
    """Those that are installed, with their n-gram modes."""
    found = []
    for engine in all_engines(peers_folder(), os.cpu_count() or 1):
        flags = {"vLLM": VLLM_NGRAM, "llama.cpp": LLAMA_NGRAM}.get(engine.name)
        if flags is None or not engine.default or engine.brief:
            continue
        if missing := engine.missing():
            print(f"{engine.label} is left out: {missing}", flush=True)
        else:
            found.append(replace(engine, variant=f"{engine.variant}, n-gram", command=(*engine.command, *flags)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=json.loads, default=NGRAM, help="speculative_config (default: %(default)s)")
    parser.add_argument("--suffix", action="store_const", dest="config", const=SUFFIX, help=f"the same as {SUFFIX}")
    parser.add_argument("--users", default="1,5,20", help="numbers of users (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each way (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="also peers that are installed, one user")
    parser.add_argument("--output-json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="flags of both servers, after --")
    args = parser.parse_args()
    salted = args.config.get("method") == "suffix"
    workloads, levels = args.workloads.split(","), [int(n) for n in args.users.split(",")]
    rows, others = [], dict[str, dict[str, float]]()
    with ExitStack() as stack:
        plain, speculative = (stack.enter_context(Server(engine)) for engine in ours(args.config, args.flags))
        for server in (plain, speculative):  # warm
            ask(server, WORKLOADS["chat"], 1, "warm" if salted else "")
        bystanders = Bystanders(plain, speculative)
        print("workload   users   without      with   ratio   (lowest - highest)  goal", flush=True)
        for users in levels:
            for workload in workloads:
                rounds = args.rounds if users == 1 else max(2, args.rounds - 1)
                rows.append(compare(plain, speculative, workload, users, rounds, salted))
                print(rows[-1], flush=True)
        busy = bystanders.share()
    for engine in peers() if args.peers else []:
        with Server(engine) as server:
            ask(server, WORKLOADS["chat"], 1)
            rates = {w: statistics.median(ask(server, WORKLOADS[w], 1)[0] for _ in range(2)) for w in workloads}
        others[engine.label] = rates
        for row in (r for r in rows if r.users == 1):
            rate = rates[row.workload]
            ratio = row.speculative / rate
            print(f"{engine.label}: {row.workload} {rate:.1f}, ours {ratio:.2f} x (goal {PEERS_GOAL:g})", flush=True)
    on = all(row.ratio >= MANY_USERS_GOAL for row in rows)
    print(
        f"never below {MANY_USERS_GOAL}: {'yes' if on else 'no'}; others used about {100 * busy:.0f} % of the machine"
    )
    if args.output_json:
        about = {"config": args.config, "rows": [asdict(row) for row in rows], "peers": others, "others_share": busy}
        args.output_json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
