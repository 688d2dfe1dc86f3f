"""`octavo bench` as it is called, with a real server and a real engine."""

from __future__ import annotations

import json
import socket

import pytest
from support.run_queue import OwnTime

from octavo.bench.hugging_face import precision
from octavo.bench.report import METRICS
from octavo.cli.main import main
from octavo.engine.args import EngineArgs

# Of a run without speech, ramp or speculation.
VLLM_FIELDS = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
}
TALK = [
    {"from": "human", "value": "The quick brown fox jumps over the lazy dog."},
    {"from": "gpt", "value": "The capital of France is Paris."},
]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": TALK}] * 12))
    return ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--sharegpt-output-len", "6"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve(shared_server, tiny_model, talks, tmp_path, capsys, backend):
    """The result block and file of vLLM's, and the timeline; the tokenizer comes from a folder without weights."""
    code = main(
        [
            "bench",
            "serve",
            "--backend",
            backend,
            "--base-url",
            shared_server.url,
            "--tokenizer",
            str(tiny_model),
            *talks,
            "--num-prompts",
            "12",
            "--request-rate",
            "200",
            "--burstiness",
            "2",
            "--max-concurrency",
            "4",
            "--ignore-eos",
            "--goodput",
            "ttft:60000",
            "e2el:60000",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
            "--num-warmups",
            "2",
            "--label",
            "mine",
            "--metric-percentiles",
            "50,99",
            "--save-detailed",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "result.json",
            "--metadata",
            "run=1",
            "--plot-timeline",
            str(tmp_path / "timeline.png"),
            "--disable-tqdm",
        ]
    )
    assert code == 0
    block = capsys.readouterr().out
    assert block.startswith(
        "============ Serving Benchmark Result ============\nSuccessful requests:                     12"
    )
    for line in ("Failed requests:", "Maximum request concurrency:", "Request goodput (req/s):", "P99 E2EL (ms):"):
        assert line in block
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["run"]) == (12, 0, "1")
    assert result["output_lens"] == [6] * 12 and result["total_output_tokens"] == 72
    assert result["request_goodput"] == result["request_throughput"]
    named = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in METRICS}
    assert named | VLLM_FIELDS <= set(result), "what vLLM's JSON has"
    assert (result["label"], result["request_rate"], len(result["queue_times"])) == ("mine", 200.0, 12)
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_goes_on_with_answers(shared_server, tiny_model, tmp_path, backend, capsys):
    """Each question of a conversation comes after the answer to the one before, with all that was said."""
    code = main(
        [
            "bench",
            "serve",
            "--backend",
            backend,
            "--base-url",
            shared_server.url,
            "--tokenizer",
            str(tiny_model),
            "--dataset-name",
            "multi_turn",
            "--num-prompts",
            "3",
            "--multi-turn-num-turns",
            "4",
            "--multi-turn-prefix-len",
            "9",
            "--multi-turn-input-len",
            "5",
            "--multi-turn-output-len",
            "6",
            "--ignore-eos",
            "--num-warmups",
            "0",
            "--save-detailed",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "result.json",
            "--disable-tqdm",
        ]
    )
    assert code == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["output_lens"]) == (12, [6] * 12)
    lengths, starts = result["input_lens"], result["start_times"]
    for turn in range(12):
        if turn % 4:
            assert lengths[turn] > lengths[turn - 1] + 5 and starts[turn] > starts[turn - 1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], True),
        (["--temperature", "0"], False),
        (["--temperature", "0.7"], False),
        (["--top-p", "0.5"], True),
        (["--extra-body", '{"temperature": 0}'], False),
    ],
    ids=str,
)
def test_serve_says_that_tokens_are_drawn_where_no_temperature_is_given(shared_server, tiny_model, capsys, flags, says):
    code = main(
        [
            "bench",
            "serve",
            "--base-url",
            shared_server.url,
            "--tokenizer",
            str(tiny_model),
            "--num-prompts",
            "1",
            "--input-len",
            "4",
            "--output-len",
            "2",
            "--num-warmups",
            "0",
            "--disable-tqdm",
            *flags,
        ]
    )
    said = capsys.readouterr().err
    assert code == 0, said
    assert ("as the server does by default" in said and "--temperature 0" in said) == says


@pytest.mark.parametrize("flags", [[], ["--model", "some/model"], ["--ready-check-timeout-sec", "0.3"]])
def test_serve_without_a_server(flags, capsys):
    """Said at once, before a tokenizer is looked for: with host, port and a way out."""
    with socket.socket() as deaf:  # takes a connection and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        for port in (9, *([] if flags else [deaf.getsockname()[1]])):
            own = OwnTime([])
            assert main(["bench", "serve", "--port", str(port), "--tokenizer", "no/such-model", *flags]) == 1
            assert own.seconds < 5
            said = capsys.readouterr().err
            assert said.startswith(f"octavo: error: no server at http://127.0.0.1:{port}: ") and said.count("\n") == 1
            assert "octavo serve" in said


@pytest.fixture(scope="module")
def tiny_weights(tiny_model, tmp_path_factory):
    """The tiny model with weights that Hugging Face can load too."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny-weights")
    config = transformers.LlamaConfig(**json.loads((tiny_model / "config.json").read_text()))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest.mark.slow
def test_throughput_beside_hugging_face(tiny_weights, talks, tmp_path, capsys):
    code = main(
        [
            "bench",
            "throughput",
            "--model",
            str(tiny_weights),
            *talks,
            "--num-prompts",
            "6",
            "--baseline",
            "hf",
            "--hf-max-batch-size",
            "3",
            "--hf-dtype",
            "bfloat16",
            "--num-gpu-blocks-override",
            "64",
            "--output-json",
            str(tmp_path / "out.json"),
            "--disable-tqdm",
        ]
    )
    assert code == 0
    lines = capsys.readouterr().out
    assert "Throughput: " in lines and "Total num output tokens:  36" in lines
    assert "output tokens/s (float32, continuous batches of up to " in lines, "precisions and batch sizes are named"
    assert "output tokens/s (bfloat16, one at a time, 6 prompts)" in lines
    assert "output tokens/s (bfloat16, static batches of 3, 6 prompts)" in lines
    assert precision(EngineArgs().create_engine_config()) == {
        "weights": "Q4_1",
        "activations": "int8",
        "kv_cache": "int8",
    }, "a device that is still to be chosen"
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["num_requests"] == 6
    assert figures["octavo"]["activations"] == "float32" and figures["octavo"]["max_num_seqs"] > 0
    assert [(one["batch_size"], one["weights"]) for one in figures["baselines"]] == [(1, "bfloat16"), (3, "bfloat16")]
    for one in figures["baselines"]:
        assert one["ratio"] == pytest.approx(figures["output_tokens_per_second"] / one["output_tokens_per_second"])


@pytest.mark.slow
def test_latency(tiny_model, tmp_path, capsys):
    code = main(
        [
            "bench",
            "latency",
            "--model",
            str(tiny_model),
            "--load-format",
            "dummy",
            "--num-gpu-blocks-override",
            "64",
            "--input-len",
            "5",
            "--output-len",
            "4",
            "--batch-size",
            "2",
            "--num-iters-warmup",
            "1",
            "--num-iters",
            "3",
            "--output-json",
            str(tmp_path / "out.json"),
            "--disable-tqdm",
        ]
    )
    assert code == 0
    assert "Avg latency: " in (lines := capsys.readouterr().out) and "99% percentile latency: " in lines
    assert len(json.loads((tmp_path / "out.json").read_text())["latencies"]) == 3


@pytest.mark.slow
def test_startup(tiny_model, tmp_path, capsys):
    flags = ["--num-iters", "1", "--output-json", str(tmp_path / "out.json")]
    assert main(["bench", "startup", *flags, "--", "--model", str(tiny_model), "--load-format", "dummy"]) == 0
    assert "best: ready after" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert 0 < figures["ready_s"] <= figures["first_token_s"]
    assert {"imports", "the core's load"} <= {phase for _, phase, _ in figures["phases"]}
