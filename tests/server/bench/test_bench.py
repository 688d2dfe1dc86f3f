"""The benches count what they say they count."""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples_of

from octavo.bench import load, serve
from octavo.bench.client import RequestResult, read_result
from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.http_client import Exchange
from octavo.bench.report import Report, parse_goodput, parse_percentiles, percentile, plot_timeline
from octavo.bench.spec_decode import SpecDecodeCounts
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer


def finish(result: RequestResult) -> RequestResult:
    result.output_tokens = len(result.itls) + 1
    result.latency = result.ttft + sum(result.itls)
    return result


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@dataclass
class Recorded:
    """A request as it went over the wire; times in seconds since the run began."""

    due: float
    sent: float
    chunks: list[tuple[float, str]]  # since it was sent; an empty text is an event, too
    prompt_tokens: int
    output_tokens: int
    lost: bool  # the connection, after all chunks

    def exchange(self) -> Exchange:
        events = [{"choices": [{"text": text, "finish_reason": None}]} for _, text in self.chunks]
        usage = {"choices": [], "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.output_tokens}}
        times = [100 + self.sent + at for at, _ in self.chunks]
        pieces = [(at, f"data: {json.dumps(event)}\n\n".encode()) for at, event in zip(times, events, strict=True)]
        pieces.append((times[-1] + 0.25, f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode()))
        return Exchange(100 + self.sent, 200, pieces, "lost" if self.lost else "")


recorded = st.builds(
    Recorded,
    due=st.floats(0, 5),
    sent=st.floats(0, 5),
    chunks=st.lists(st.tuples(st.floats(0.001, 9), st.sampled_from(["", "a", "bc"])), min_size=1, max_size=9).map(
        sorted
    ),
    prompt_tokens=st.integers(1, 99),
    output_tokens=st.integers(1, 30),
    lost=st.booleans(),
)


@given(st.lists(recorded, min_size=1, max_size=8), st.floats(10, 20))
@settings(max_examples=examples_of(60), deadline=None)
def test_figures_are_those_of_vllm_s_definitions(many: list[Recorded], duration: float) -> None:
    """Computed a second time, from the wire and the definitions: TTFT is from sending to the first event with choices,
    ITL between two of them, the end-to-end latency ends with the last, TPOT is the rest of it after the first token,
    shared by the other tokens that the usage counts, and requests of one token have none."""
    results = [read_result(r.exchange(), 0, 100.0) for r in many]
    for result, r in zip(results, many, strict=True):
        result.queued = max(0.0, r.sent - r.due)
    goals = {"ttft": 2000.0, "tpot": 500.0, "e2el": 6000.0}
    limits = parse_goodput([f"{name}:{limit}" for name, limit in goals.items()])
    names = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
    found = Report(results, duration, limits, (50.0, 99.9), names, max_concurrency=4, request_rate=3.0).to_dict()

    done = [r for r in many if not r.lost]
    times = [np.array([at for at, _ in r.chunks]) for r in done]
    tokens = np.array([r.output_tokens for r in done])
    ttft, e2el = np.array([t[0] for t in times]), np.array([t[-1] for t in times])
    tpot = np.where(tokens > 1, (e2el - ttft) / np.maximum(tokens - 1, 1), 0.0)
    queue = np.array([max(0.0, r.sent - r.due) for r in done])
    seconds = {
        "ttft": ttft,
        "tpot": tpot[tokens > 1],
        "itl": np.concatenate([np.diff(t) for t in times] or [[]]),
        "e2el": e2el,
        "client_queue_time": queue,
        "e2el_including_client_queue": e2el + queue,
    }
    good = (1000 * ttft <= goals["ttft"]) & (1000 * tpot <= goals["tpot"]) & (1000 * e2el <= goals["e2el"])
    prompts, outputs = sum(r.prompt_tokens for r in done), int(tokens.sum())
    expected: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(many) - len(done),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": good.sum() / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
    }
    for name, values in seconds.items():
        for kind, value in {
            "mean": np.mean,
            "median": np.median,
            "std": np.std,
            "p50": lambda x: np.percentile(x, 50),
            "p99.9": lambda x: np.percentile(x, 99.9),
        }.items():
            expected[f"{kind}_{name}_ms"] = 1000 * value(values) if len(values) else 0.0
    peaks = {name: found.pop(name) for name in ("max_output_tokens_per_s", "max_concurrent_requests")}
    assert found == {name: pytest.approx(value, rel=1e-6, abs=1e-6) for name, value in expected.items()}
    if done:
        first = min(r.sent for r in done)
        # Seconds since the first request: each event belongs to one, each request to all that it touches.
        ats = [int(r.sent - first + at) for r, t in zip(done, times, strict=True) for at in t]
        spans = [range(int(r.sent - first), int(r.sent - first + t[-1]) + 1) for r, t in zip(done, times, strict=True)]
        # A time that lies on a border but for rounding may count in either second.
        assert abs(peaks["max_output_tokens_per_s"] - max(map(ats.count, ats))) <= 1
        assert abs(peaks["max_concurrent_requests"] - max(sum(s in span for span in spans) for s in range(16))) <= 1


def test_servers_that_do_not_count_are_counted_for() -> None:
    body = b'data: {"choices": [{"text": "one two"}]}\n\ndata: {"choices": [{"text": " three"}]}\n\ndata: [DONE]\n\n'
    exchange = Exchange(1.0, 200, [(2.0, body)])
    assert read_result(exchange, 5, 0.0, lambda text: len(text.split())).output_tokens == 3
    assert read_result(exchange, 5, 0.0).output_tokens == 2


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_arrivals_keep_to_the_rate_and_ramp() -> None:
    args = arguments("--request-rate", "50", "--burstiness", "4", "--seed", "3")
    times = load.delays(args, 5000)
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(5000 / 50), "the rate is kept, whatever the seed"
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(4), rel=0.1)
    np.random.seed(3)  # vLLM draws from numpy's global generator, a gap at a time, the first one included
    drawn = np.cumsum([np.random.gamma(shape=4, scale=1 / (50 * 4)) for _ in range(5000)])
    assert times == pytest.approx(drawn * (5000 / 50) / drawn[-1])
    assert np.diff(load.delays(arguments("--request-rate", "8", "--burstiness", "inf"), 9)) == pytest.approx(
        [1 / 8] * 8
    )
    assert set(load.delays(arguments(), 10)) == {0.0}
    words = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "100"]
    gaps = np.diff(load.delays(arguments(*words), 2000))
    assert gaps[:200].mean() > 5 * gaps[-200:].mean()
    assert load.rates(arguments(*words), 4) == pytest.approx([1, 34, 67, 100])
    assert load.rates(arguments(*words, "--ramp-up-strategy", "exponential"), 3) == pytest.approx([1, 10, 100])


@pytest.mark.parametrize(
    "words",
    [
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--ramp-up-strategy", "linear"],
        ["--ramp-up-start-rps", "3"],
        ["--request-rate", "3", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"],
        ["--max-concurrency", "0"],
        ["--num-warmups", "-1"],
        ["--goodput", "speed:3"],
        ["--metric-percentiles", "50,101"],
        ["--header", "x"],
    ],
)
def test_flags_that_make_no_sense_are_refused(words: list[str]) -> None:
    args = arguments(*words)
    with pytest.raises(ConfigError, match=words[0]):
        parse_goodput(args.goodput)
        parse_percentiles(args.metric_percentiles)
        load.pairs(args.header, "--header")
        load.check_load(args)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(EngineArgs().create_engine_config().model.files)


def dataset(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    return parser.parse_args(words)


def test_random_prompts_have_their_length_as_text_too(tokenizer: Tokenizer) -> None:
    args = dataset(
        "--num-prompts", "20", "--input-len", "50", "--random-range-ratio", "0.5", "--random-prefix-len", "9"
    )
    samples = load_dataset(args, tokenizer)
    assert samples == load_dataset(args, tokenizer)
    assert len({tuple(s.prompt_token_ids[:9]) for s in samples}) == 1
    for sample in samples:
        assert 34 <= sample.prompt_len <= 84
        assert len(tokenizer.encode(sample.prompt)) == sample.prompt_len


def test_random_lengths_are_vllm_s_of_that_seed(tokenizer: Tokenizer) -> None:
    """The numbers are what vLLM 0.32 drew for them."""
    words = ["--num-prompts", "6", "--seed", "7", "--input-len", "50", "--output-len", "20", "--random-range-ratio"]
    samples = load_dataset(dataset(*words, '{"input": 0.5, "output": 0.25}'), tokenizer)
    assert [sample.prompt_len for sample in samples] == [73, 56, 59, 70, 54, 64]
    assert [sample.output_len for sample in samples] == [24, 17, 15, 18, 18, 24]
    for wrong in ("1", "-0.1", "x", '{"input": 0.5}'):
        with pytest.raises(SystemExit):
            dataset("--random-range-ratio", wrong)


def test_prefix_repetition_repeats_prefixes(tokenizer: Tokenizer) -> None:
    args = dataset(
        "--dataset-name", "prefix_repetition", "--num-prompts", "30", "--prefix-repetition-num-prefixes", "3"
    )
    samples = load_dataset(args, tokenizer)
    assert len({tuple(s.prompt_token_ids[:256]) for s in samples}) == 3
    assert len({tuple(s.prompt_token_ids) for s in samples}) == 30


def test_sharegpt_takes_the_first_turn(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of vLLM's seed, and the same ones again where there are too few."""
    talks = [
        {"conversations": [{"value": f"Tell me of river {i}, please."}, {"value": "It flows to the sea."}][: 1 + i % 4]}
        for i in range(12)
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--seed", "5"]
    usable = [talk["conversations"][0]["value"] for talk in talks if len(talk["conversations"]) >= 2]
    random.seed(5)
    shuffled = usable.copy()
    random.shuffle(shuffled)
    samples = load_dataset(dataset(*words, "--num-prompts", "4"), tokenizer)
    assert [sample.prompt for sample in samples] == shuffled[:4] and capsys.readouterr().err == ""
    assert {sample.output_len for sample in samples} == {len(tokenizer.encode("It flows to the sea."))}
    many = load_dataset(dataset(*words, "--num-prompts", "20", "--disable-shuffle", "--output-len", "3"), tokenizer)
    assert [sample.prompt for sample in many[:9]] == usable and len(many) == 20
    assert {sample.prompt for sample in many} == set(usable) and {sample.output_len for sample in many} == {3}
    assert "(9) than --num-prompts asks for (20)" in capsys.readouterr().err
    assert len(load_dataset(dataset(*words, "--num-prompts", "20", "--no-oversample"), tokenizer)) == 9


def test_custom_prompts_are_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Name a river.", "output_tokens": 9}\n\n{"prompt": "Name \u2028a sea."}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--num-prompts"]
    first, second = load_dataset(dataset(*words, "2"), tokenizer)
    assert first.prompt == tokenizer.apply_chat_template([{"role": "user", "content": "Name a river."}])
    assert (first.output_len, second.output_len, first.prompt_len) == (256, 256, len(tokenizer.encode(first.prompt)))
    [plain] = load_dataset(dataset(*words, "1", "--skip-chat-template", "--custom-output-len", "-1"), tokenizer)
    assert (plain.prompt, plain.output_len) == ("Name a river.", 9)
    chat = argparse.Namespace(**vars(dataset(*words, "1")), backend="openai-chat")
    assert load_dataset(chat, tokenizer)[0].prompt == "Name a river.", "the server has the template"
    with pytest.raises(ConfigError, match="output_tokens"):
        load_dataset(dataset(*words, "2", "--custom-output-len", "-1"), tokenizer)
    path.write_text('{"prompt": "Hi"}\n["prompt"]\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_dataset(dataset(*words, "2"), tokenizer)
    with pytest.raises(ConfigError, match="reads no file"):
        load_dataset(dataset("--dataset-path", str(path)), tokenizer)


def test_conversations_begin_alike_and_lead_on(tokenizer: Tokenizer) -> None:
    words = "--dataset-name multi_turn --num-prompts 4 --multi-turn-num-turns 3 --multi-turn-prefix-len 20"
    samples = load_dataset(dataset(*words.split(), "--multi-turn-input-len", "7"), tokenizer)
    assert len({tuple(s.prompt_token_ids[:20]) for s in samples}) == 1
    turns = [turn for s in samples for turn in (s.follow_up, s.follow_up and s.follow_up.follow_up) if turn]
    assert [s.prompt_len for s in samples] == [27] * 4 and [s.prompt_len for s in turns] == [7] * 8
    assert len({turn.prompt for turn in turns}) == 8 and {turn.output_len for turn in turns} == {128}


def test_conversations_of_a_file_are_its_questions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    said = [{"role": role, "content": f"{i} {role}"} for i in range(3) for role in ("user", "assistant")]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"messages": said}]))
    words = ["--dataset-name", "multi_turn", "--num-prompts", "1", "--dataset-path", str(path)]
    [first] = load_dataset(dataset(*words, "--multi-turn-num-turns", "2"), tokenizer)
    assert first.follow_up is not None and first.follow_up.follow_up is None
    assert (first.prompt, first.follow_up.prompt) == ("0 user", "1 user")
    path.write_text(json.dumps([{"messages": [{"text": "?"}]}]))
    with pytest.raises(ConfigError, match="--dataset-path"):
        load_dataset(dataset(*words), tokenizer)


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = [finish(RequestResult(5, start=i / 3, success=True, ttft=0.1, itls=[0.05] * 20)) for i in range(12)]
    plot_timeline(Report(many, 5.0, {}), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_s_counts_of_guesses_are_the_difference_of_two_pages() -> None:
    def page(scale: int) -> str:
        label = 'model_name="m{x}",engine="0"'
        values = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 25}
        lines = [f"vllm:spec_decode_num_{name}_total{{{label}}} {scale * n:.1f}" for name, n in values.items()]
        for at, n in enumerate((10, 8, 7, 0)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{label},position="{at}"}} {scale * n:.1f}')
        created = 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9'
        return "\n".join(["# HELP vllm:spec_decode_num_drafts_total x", *lines, created])

    before, after = SpecDecodeCounts.parse(page(1)), SpecDecodeCounts.parse(page(3))
    assert before is not None and after is not None
    figures = after.since(before).to_dict()
    assert figures == {
        "spec_decode_acceptance_rate": 62.5,
        "spec_decode_acceptance_length": 3.5,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 50,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.8, 0.7, 0.0],
    }
    assert SpecDecodeCounts.parse("vllm:num_requests_running 1.0\n") is None
    report = Report([], 1.0, {}, spec_decode=after.since(before))
    assert (
        "Acceptance length:                       3.50" in str(report) and report.to_dict().items() >= figures.items()
    )
