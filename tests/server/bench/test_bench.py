"""The benches count what they say they count."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench import serve
from octavo.bench.client import RequestResult
from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.report import Report, parse_goodput, percentile, plot_timeline
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer

results = st.lists(
    st.builds(
        RequestResult,
        prompt_len=st.integers(1, 100),
        start=st.floats(0, 5),
        success=st.just(True),
        ttft=st.floats(0.001, 2),
        itls=st.lists(st.floats(0.001, 0.5), max_size=20),
    ),
    min_size=1,
    max_size=20,
).map(lambda many: [finish(r) for r in many])


def finish(result: RequestResult) -> RequestResult:
    result.output_tokens = len(result.itls) + 1
    result.latency = result.ttft + sum(result.itls)
    return result


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@given(results)
def test_a_report_adds_up(many: list[RequestResult]) -> None:
    duration = max(r.start + r.latency for r in many)
    figures = Report(
        many, duration, parse_goodput(["ttft:500"]), (50.0, 99.0), ("ttft", "tpot", "itl", "e2el")
    ).to_dict()
    tokens = sum(r.output_tokens for r in many)
    assert figures["output_throughput"] == pytest.approx(tokens / duration)
    assert figures["request_goodput"] == pytest.approx(sum(r.ttft <= 0.5 for r in many) / duration)
    assert figures["mean_ttft_ms"] == pytest.approx(1000 * statistics.mean(r.ttft for r in many))
    assert figures["median_ttft_ms"] == pytest.approx(figures["p50_ttft_ms"])
    assert 1 <= figures["max_concurrent_requests"] <= len(many)
    assert figures["max_output_tokens_per_s"] <= tokens


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_arrivals_keep_to_the_rate_and_ramp() -> None:
    args = arguments("--request-rate", "50", "--burstiness", "4")
    times = serve.delays(args, 5000)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(4), rel=0.1)
    assert set(serve.delays(arguments(), 10)) == {0.0}
    ramp = arguments("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "100")
    gaps = np.diff(serve.delays(ramp, 2000))
    assert gaps[:200].mean() > 5 * gaps[-200:].mean()


@pytest.mark.parametrize(
    "words", [["--request-rate", "0"], ["--ramp-up-strategy", "linear"], ["--goodput", "speed:3"], ["--header", "x"]]
)
def test_flags_that_make_no_sense_are_refused(words: list[str]) -> None:
    args = arguments(*words)
    with pytest.raises(ConfigError, match=words[0]):
        parse_goodput(args.goodput)
        serve.pairs(args.header, "--header")
        serve.delays(args, 1)


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


def test_prefix_repetition_repeats_prefixes(tokenizer: Tokenizer) -> None:
    args = dataset(
        "--dataset-name", "prefix_repetition", "--num-prompts", "30", "--prefix-repetition-num-prefixes", "3"
    )
    samples = load_dataset(args, tokenizer)
    assert len({tuple(s.prompt_token_ids[:256]) for s in samples}) == 3
    assert len({tuple(s.prompt_token_ids) for s in samples}) == 30


def test_sharegpt_takes_the_first_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Tell me of rivers, please."}, {"from": "gpt", "value": "They flow to the sea."}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    [sample] = load_dataset(dataset(*words, "--num-prompts", "1"), tokenizer)
    assert sample.prompt == talk[0]["value"]
    with pytest.raises(ConfigError, match="--num-prompts"):
        load_dataset(dataset(*words, "--num-prompts", "2"), tokenizer)


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = [finish(RequestResult(5, start=i / 3, success=True, ttft=0.1, itls=[0.05] * 20)) for i in range(12)]
    plot_timeline(Report(many, 5.0, {}), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
