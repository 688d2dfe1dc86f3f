"""/metrics under vLLM's names, and right: what dashboards, scaling rules and routers read."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.interface.engine_config import DEFAULT_ON_CPU

PROMPT = "The quick brown fox jumps"
LABELS = {"model_name": "metered", "engine": "0"}


@pytest.fixture(scope="module")
def server(start):
    """A server of its own, so that counts are exact."""
    server = start(
        "--served-model-name",
        "metered",
        "--max-num-seqs",
        "4",
        "--num-gpu-blocks-override",
        "64",
        "--max-num-queued-reqs",
        "6",
    )
    assert sum(value for name, _, value in scrape(server) if name == "vllm:request_success_total") == 0
    return server


def scrape(server) -> list[tuple[str, dict[str, str], float]]:
    text = server.get("/metrics").text
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


class Reading:
    def __init__(self, server) -> None:
        self.samples = scrape(server)

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        found = [v for n, have, v in self.samples if n == name and labels.items() <= have.items()]
        assert found, f"{name} {labels} is not there"
        return sum(found)


class Change:
    """What requests between two readings add."""

    def __init__(self, before: Reading, after: Reading) -> None:
        self.before, self.after = before, after

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        return self.after.of(name, **labels) - self.before.of(name, **labels)


def settled(server) -> Reading:
    """Once nothing is under way, an answer that its client has left neither."""
    deadline = time.monotonic() + 90
    while True:
        is_busy, found = server.get("/load").json()["server_load"], Reading(server)
        if not is_busy and not found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]:
            return found
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.02)


def measure(server, action) -> Change:
    before = settled(server)
    action()
    return Change(before, settled(server))


def complete(server, **body) -> dict:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_counts_after_sequential_requests(server):
    """N requests of P prompt tokens and M tokens each; the second and later ones hit the prefix cache."""
    n, m = 10, 10
    p = complete(server, max_tokens=1, prompt="other")["usage"]["prompt_tokens"]
    p = server.post("/tokenize", {"prompt": PROMPT}).json()["count"]
    change = measure(server, lambda: [complete(server, max_tokens=m) for _ in range(n)])
    assert change["vllm:time_to_first_token_seconds_count"] == n
    assert change["vllm:inter_token_latency_seconds_count"] == n * (m - 1)
    assert change["vllm:iteration_tokens_total_sum"] == n * (p + m)
    assert change["vllm:iteration_tokens_total_count"] == n * m
    assert change["octavo:engine_steps_total"] >= n * m - 1, "the last is counted when its token is out"
    assert (
        change["vllm:request_success_total"] == change.of("vllm:request_success_total", finished_reason="length") == n
    )
    assert change["vllm:prompt_tokens_total"] == n * p
    assert change["vllm:generation_tokens_total"] == n * m
    assert change["vllm:prompt_tokens_cached_total"] == (n - 1) * (p - 1)
    assert change.of("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == (n - 1) * (p - 1)
    assert change.of("vllm:prompt_tokens_by_source_total", source="local_compute") == n * p - (n - 1) * (p - 1)
    assert change["vllm:prefix_cache_queries_total"] == n * p
    assert change["vllm:prefix_cache_hits_total"] == (n - 1) * (p - 1)
    assert change["vllm:request_prefill_kv_computed_tokens_sum"] == n * p - (n - 1) * (p - 1)
    per_request = [name for name in HISTOGRAMS if name.startswith(("request_", "e2e_"))]
    assert len(per_request) == 13
    for histogram in per_request:
        assert change[f"vllm:{histogram}_count"] == n, histogram
    assert change["vllm:request_params_max_tokens_sum"] == change["vllm:request_generation_tokens_sum"] == n * m
    parts = sum(change[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(change["vllm:e2e_request_latency_seconds_sum"], rel=0.2, abs=0.05)


def test_samples_count_each_and_their_prompt_once(server):
    change = measure(server, lambda: complete(server, max_tokens=6, n=3, temperature=1, seed=1))
    assert change["vllm:request_success_total"] == 3
    assert change["vllm:time_to_first_token_seconds_count"] == 3
    assert change["vllm:generation_tokens_total"] == 18
    assert change["vllm:request_params_n_count"] == 1 and change["vllm:request_params_n_sum"] == 3
    assert change["vllm:prompt_tokens_total"] == server.post("/tokenize", {"prompt": PROMPT}).json()["count"]


def test_stop_and_stop_strings_are_stops(server):
    text = complete(server, max_tokens=20)["choices"][0]["text"]
    change = measure(server, lambda: complete(server, max_tokens=20, stop=text[5:8]))
    assert change.of("vllm:request_success_total", finished_reason="stop") == 1


def test_an_abort_is_counted_and_leaves_nothing_running(server):
    def leave() -> None:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=90) as response:
            next(response.iter_lines())

    change = measure(server, leave)
    assert change.of("vllm:request_success_total", finished_reason="abort") == 1
    assert change["vllm:request_success_total"] == 1
    assert change.after["vllm:kv_cache_usage_perc"] == 0


def test_preemptions_count_no_token_twice(server):
    """Four sequences that outgrow the 64 blocks together: some are put back and computed anew."""
    m = 500
    change = measure(server, lambda: complete(server, max_tokens=m, prompt=[f"{i} {PROMPT}" for i in range(4)]))
    preemptions = change["vllm:num_preemptions_total"]
    assert preemptions == change["vllm:request_num_preemptions_sum"] > 0
    assert change["vllm:request_num_preemptions_count"] == 4
    assert change["vllm:generation_tokens_total"] == change["vllm:request_generation_tokens_sum"] == 4 * m
    prompts = change["vllm:prompt_tokens_total"]
    assert prompts == change["vllm:request_prompt_tokens_sum"] == change["vllm:prefix_cache_queries_total"]
    assert change["vllm:iteration_tokens_total_sum"] == prompts + 4 * m
    assert change["vllm:time_to_first_token_seconds_count"] == 4
    assert change["vllm:inter_token_latency_seconds_count"] == 4 * (m - 1)
    assert change["vllm:request_success_total"] == 4


def test_a_full_queue_is_429_with_retry_after_and_counted(server):
    """Four run and six may wait: the twelfth of twenty at once finds the queue full."""
    statuses: list[int] = []

    def send() -> None:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True})
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert "--max-num-queued-reqs" in answer.json()["error"]["message"]

    def many() -> None:
        threads = [threading.Thread(target=send) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with httpx.Client(base_url=server.url, timeout=60) as client:
        change = measure(server, many)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 10
    assert change.of("vllm:admission_rejections_total", reason="max_num_queued_reqs") == statuses.count(429)
    too_many = server.post("/v1/completions", {"prompt": PROMPT, "n": 11})
    assert too_many.status_code == 429 and too_many.json()["error"]["code"] == "too_many_sequences"


GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cpu_prefix_cache_hit_rate",
    "gpu_prefix_cache_hit_rate",
]
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
]
HISTOGRAMS = [
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "time_per_output_token_seconds",
]


def test_names_of_vllm_have_its_types_and_labels(server):
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").text)}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            assert all(sample.labels.items() >= LABELS.items() for sample in family.samples), name
            if kind == "counter":
                assert {s.name for s in family.samples} == {f"vllm:{name}_total"}
    info = families["vllm:cache_config_info"].samples[0]
    assert info.value == 1 and info.labels["block_size"] == "16" and info.labels["num_gpu_blocks_override"] == "64"
    sizes = {name: info.labels[name] for name in ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")}
    assert sizes == {"num_gpu_blocks": "64", "kv_cache_size_tokens": "1024", "kv_cache_max_concurrency": "1.0"}
    reasons = {s.labels["finished_reason"] for s in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (
            "time_to_first_token_seconds",
            ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
        ),
        ("inter_token_latency_seconds", ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"),
        ("e2e_request_latency_seconds", ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"),
        ("request_prompt_tokens", "1 2 5 10 20 50 100 200 500 1000"),
        ("iteration_tokens_total", "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
        ("request_params_n", "1 2 5 10 20"),
        ("request_num_preemptions", "1 2 3 4 5 10 20"),
    ],
)
def test_buckets_are_vllms(server, name, bounds):
    samples = [labels["le"] for n, labels, _ in scrape(server) if n == f"vllm:{name}_bucket"]
    assert [float(le) for le in samples] == [*map(float, bounds.split()), float("inf")]


def test_our_own_metrics(server):
    reading = Reading(server)
    used, total = reading["octavo:device_memory_used_bytes"], reading["octavo:device_memory_total_bytes"]
    assert 50e6 < used < total
    for kind in ("prefill", "decode"):
        assert reading.of("octavo:step_seconds_count", kind=kind) > 0
        assert reading.of("octavo:step_tokens_total", kind=kind, tokens="generation") > 0
    assert reading.of("octavo:step_tokens_total", kind="decode", tokens="prompt") == 0
    phases = {
        phase: reading.of("octavo:startup_seconds", phase=phase) for phase in ("fetch", "import", "load", "ready")
    }
    assert min(phases.values()) > 0 and max(phases, key=lambda phase: phases[phase]) == "ready"
    assert reading["octavo:max_num_seqs"] >= 1
    weights = {labels["kind"]: value for name, labels, value in scrape(server) if name == "octavo:weight_bytes"}
    shares = {labels["part"]: value for name, labels, value in scrape(server) if name == "octavo:memory_bytes"}
    assert (shares["weights"], sum(shares.values())) == (sum(weights.values()), total)
    assert weights["tables"] > 0 and max(weights, key=lambda kind: weights[kind]) in ("float32", "bfloat16")
    assert reading["octavo_core_process_resident_memory_bytes"] > reading["process_resident_memory_bytes"]


def test_http_requests_are_counted_by_route(server):
    def requests() -> None:
        complete(server, max_tokens=1)
        server.post("/v1/completions", {"prompt": ""})
        server.get("/health")
        server.get("/nowhere/at/all")

    change = measure(server, requests)
    route = {"handler": "/v1/completions", "method": "POST"}
    assert change.of("http_requests_total", **route, status="2xx") == 1
    assert change.of("http_requests_total", **route, status="4xx") == 1
    assert change.of("http_request_duration_seconds_count", **route) == 2
    assert change["http_request_duration_highr_seconds_count"] == 3, "health and metrics are not counted"
    assert change.after.of("http_requests_total", handler="none") >= 1


def test_speculation_is_counted_and_changes_no_answer(start, server) -> None:
    """Its counters are there from the start, by position too, and only where it is on."""
    assert any("spec_decode" in name for name, _, _ in scrape(server)) == DEFAULT_ON_CPU.is_on
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    other = start("--speculative-config", json.dumps(config), "--max-num-seqs", "8", "--num-gpu-blocks-override", "64")
    spec = "vllm:spec_decode_num_"
    counters = [f"{spec}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = Reading(other)
    assert [before[name] for name in counters] == [0, 0, 0]
    assert [before.of(f"{spec}accepted_tokens_per_pos_total", position=str(i)) for i in range(3)] == [0, 0, 0]
    body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "logprobs": 1}  # goes round
    answers = [one.post("/v1/completions", body).json()["choices"] for one in (server, other)]
    assert answers[0] == answers[1]
    after = Reading(other)
    drafts, tokens, accepted = (after[name] for name in counters)
    by_position = [after.of(f"{spec}accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert 0 < drafts <= tokens <= 3 * drafts and 0 < accepted <= tokens
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)


def test_lines_for_billing_that_are_left_out_are_counted(server):
    line = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"
    user = {"role": "user", "content": line}

    def ask() -> None:
        body = {"model": "metered", "max_tokens": 1, "system": f"A\n{line}\nB", "messages": [user]}
        server.post("/v1/messages", body).raise_for_status()
        system = {"role": "developer", "content": [{"type": "text", "text": line}]}
        body = {"max_tokens": 1, "messages": [system, user]}
        server.post("/v1/chat/completions", body).raise_for_status()

    assert measure(server, ask)["octavo:prompt_lines_stripped_total"] == 2


def test_prompts_that_are_too_long_are_counted_in_every_dialect(server):
    """Once each, and nothing else that is refused."""
    long = "x " * 5000
    messages = [{"role": "user", "content": long}]
    bodies = {
        "/v1/completions": {"prompt": long, "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"model": "metered", "max_tokens": 1, "messages": messages},
        "/v1/responses": {"input": long, "store": False},
    }

    def ask() -> None:
        for path, body in bodies.items():
            assert server.post(path, body).status_code == 400, path
        assert server.post("/v1/completions", {"prompt": "x", "temperature": -1}).status_code == 400

    assert measure(server, ask)["octavo:prompt_too_long_total"] == len(bodies)
