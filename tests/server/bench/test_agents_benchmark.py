"""The benchmark of agents: what it draws, counts and judges, and that a real server hits what can be hit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks import agents
from benchmarks.peers.engines import Engine, serve_octavo
from benchmarks.peers.files import NAME

from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

SIZE = agents.Size(agents=2, turns=3, first=400, last=900)


@pytest.fixture(scope="module")
def trace() -> list[list[agents.Turn]]:
    return agents.draw_trace(Tokenizer.from_files(resolve_model(None, progress=False)), SIZE, seed=3)


def test_every_turn_continues_the_one_before(trace: list[list[agents.Turn]]) -> None:
    assert len(trace) == 2
    for turns in trace:
        assert len(turns) == 3
        for earlier, later in pairwise(turns):
            assert later.messages[: len(earlier.messages)] == earlier.messages
            assert [message["role"] for message in later.messages[len(earlier.messages) :]] == ["assistant", "user"]
    one, other = (turns[0].messages for turns in trace)
    assert one[0] == other[0] and one[1] != other[1], "agents share the system message alone"


def test_contexts_grow_as_asked(trace: list[list[agents.Turn]]) -> None:
    tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
    lengths = [len(tokenizer.encode(tokenizer.apply_chat_template(list(turn.messages)), False)) for turn in trace[0]]
    assert lengths == sorted(lengths)
    assert abs(lengths[0] - SIZE.first) < 0.1 * SIZE.first and abs(lengths[-1] - SIZE.last) < 0.2 * SIZE.last


def test_cached_tokens_are_read_as_each_engine_tells_them() -> None:
    ours = b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": 40}}}\n\ndata: [DONE]\n'
    assert agents.cached_tokens(ours) == 40
    assert agents.cached_tokens(b'data: {"choices": [], "timings": {"cache_n": 7}}\n') == 7
    assert agents.cached_tokens(b'data: {"usage": null}\n') == 0


def test_the_better_of_the_others_judges() -> None:
    def row(engine: str, p50: float, p95: float, hit_rate: float = 0.98) -> agents.Row:
        return agents.Row(engine, p50, p95, 0, 0, hit_rate, 0, 0, 0, "")

    lines = agents.verdicts([row("Octavo", 40, 90), row("llama.cpp", 100, 120), row("vLLM", 90, 130)])
    assert [line.rpartition(": ")[2] for line in lines] == ["met", "met", "MISSED"]
    assert agents.verdicts([row("vLLM", 1, 1)]) == []


def test_a_server_hits_what_could_be_hit(trace: list[list[agents.Turn]]) -> None:
    engine = Engine("Octavo", "", serve_octavo("--served-model-name", NAME), model=NAME)
    row = agents.measure(engine, trace, timeout=120)
    assert not row.errors, row.error
    assert row.hit_rate >= agents.HIT_GOAL
