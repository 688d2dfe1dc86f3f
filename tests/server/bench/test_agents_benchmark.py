"""The benchmark of agents: what it draws, counts and judges, and that a real server hits what can be hit."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks import agents
from benchmarks.peers.engines import Engine, serve_octavo
from benchmarks.peers.files import NAME
from benchmarks.peers.model_files import ModelFile
from benchmarks.peers.random_models import LLAMA_1B, QWEN3_0_6B

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


def test_vllm_has_memory_for_all_conversations(tmp_path: Path) -> None:
    size = agents.Size(agents=8, turns=20, first=8192, last=32768)
    file = ModelFile("x", "x", tmp_path, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    vllm = agents.with_cache_space(Engine("vLLM", "", env={"VLLM_CPU_KVCACHE_SPACE": "2", "A": "b"}), file, size)
    # 28 layers of 8 heads of 128 keys and values of two bytes: 112 KiB a token, 28.9 GiB.
    assert vllm.env == {"VLLM_CPU_KVCACHE_SPACE": "29", "A": "b"}
    assert agents.bytes_per_token(LLAMA_1B, "bfloat16") == 16 * 2 * 8 * 64 * 2
    assert agents.bytes_per_token(LLAMA_1B, "float32") == 16 * 2 * 8 * 64 * 4
    ours = Engine("Octavo", "")
    assert agents.with_cache_space(ours, file, size) is ours


def test_the_page_has_a_table_for_each_trace() -> None:
    def cell(engine: str, p50: float, size: agents.Size = SIZE, **more: object) -> dict[str, object]:
        about = {"date": "2026-11-30T10:00:00+00:00", "commit": "abc1234", "size": asdict(size), "title": "Llama Q4"}
        return about | asdict(agents.Row(engine, p50, 2 * p50, 9000, 12.5, 0.985, 60, 3 * 10**9, 0, "")) | more

    large = agents.Size(8, 20, 8192, 32768)
    cells = {"a": cell("Octavo", 400), "b": cell("llama.cpp", 1000), "c": cell("vLLM", 1, errors=2, error="a | b")}
    page = agents.page({"Zen 4": cells | {"d": cell("Octavo", 700, large)}, "Zen 5": {}})
    assert page.count("| | first token") == 2
    assert "Zen 4, 2026-11-30, Llama Q4: 2 agents, 3 turns each, contexts of 400 to 900 tokens." in page
    assert "8 agents, 20 turns each, contexts of 8,192 to 32,768 tokens." in page
    assert "| Octavo | 0.40 s | 0.80 s | 9.00 s | 12.5 | 98.5% | 3.00 GB |" in page
    assert "| vLLM | 2 errors: a ; b |" in page
    assert page.count("| Octavo over the better of the others | 0.40 | 0.40 |") == 1
    assert agents.page({}) == "Not measured yet."


def test_a_server_hits_what_could_be_hit(trace: list[list[agents.Turn]]) -> None:
    engine = Engine("Octavo", "", serve_octavo("--served-model-name", NAME), model=NAME)
    row = agents.measure(engine, trace, timeout=120)
    assert not row.errors, row.error
    assert row.hit_rate >= agents.HIT_GOAL
