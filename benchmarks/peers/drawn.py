"""Drawn tokens of every server that is installed, over HTTP, with the same parameters: see benchmarks/drawing.py.

Each server answers greedily before and after each kind of sampling, so that its share of its own greedy tokens a second
compares with the others'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.engines import all_engines, peers_folder
from benchmarks.peers.load import Level, make_prompts, run_level
from benchmarks.peers.server import Server, ServerError
from octavo.fetch.sources import resolve_model
from octavo.system.limits import cpu_count
from octavo.text.tokenizer import Tokenizer

INPUT = 128
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # llama.cpp cuts where nothing is said
LLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


@dataclass
class PeerShare:
    """One kind of one server with so many users; ``problem``: why there are no figures."""

    engine: str
    kind: str
    users: int
    tokens_a_second: float = 0.0
    share: float = 0.0  # of its own greedy ones
    problem: str = ""

    def __str__(self) -> str:
        figures = f"{self.tokens_a_second:>9.0f}{self.share:>8.3f}"
        return f"{self.engine:<24}{self.kind:<32}{self.users:>5}{'  ' + self.problem if self.problem else figures}"


def fields_of(told: dict[str, Any], schema: Any, engine: str) -> dict[str, Any] | None:
    """The fields of a request with these parameters, in that server's words; None: it has none for them."""
    if "bad_words_token_ids" in told:
        return None
    fields = NEUTRAL | {name: value for name, value in told.items() if name != "structured_outputs"}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    if engine == "llama.cpp":
        fields = {LLAMA_NAMES.get(name, name): value for name, value in fields.items()}
        if "repeat_penalty" in fields:
            fields["repeat_last_n"] = -1
    if "structured_outputs" in told:
        fields |= {"json_schema": schema} if engine == "llama.cpp" else {"structured_outputs": {"json": schema}}
    return fields


def shares_of_peers(
    kinds: dict[str, dict[str, Any]], schema: Any, levels: list[int], rounds: int, output: int
) -> Iterator[PeerShare]:
    """Of every installed server in turn, ours first."""
    tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
    for engine in all_engines(peers_folder(), cpu_count()):
        if engine.missing() or engine.brief or not engine.default:
            continue
        try:
            with Server(engine) as server:
                seeds = iter(range(1_000_000))

                def level(users: int, options: dict[str, Any]) -> Level:
                    prompts = make_prompts(tokenizer, users, INPUT, next(seeds))  # noqa: B023
                    return run_level(server.port, engine.model, prompts, users, output, options=options)  # noqa: B023

                for users in levels:
                    level(users, {})
                    for kind, told in kinds.items():
                        fields = fields_of(told, schema, engine.name)
                        if fields is not None:
                            yield _share(level, engine.label, kind, users, fields, rounds)
        except (ServerError, TimeoutError, OSError) as error:
            yield PeerShare(engine.label, "all", 0, problem=str(error))


def _share(level: Any, engine: str, kind: str, users: int, fields: dict[str, Any], rounds: int) -> PeerShare:
    level(users, fields)  # warm: grammars are compiled
    rates, shares, before = [], [], level(users, {})
    for _ in range(rounds):
        drawn, after = level(users, fields), level(users, {})
        if drawn.errors:
            return PeerShare(engine, kind, users, problem=drawn.error)
        rates.append(drawn.tok_s)
        shares.append(2 * drawn.tok_s / (before.tok_s + after.tok_s))
        before = after
    return PeerShare(engine, kind, users, statistics.median(rates), statistics.median(shares))
