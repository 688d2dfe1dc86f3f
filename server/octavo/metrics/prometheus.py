"""Prometheus metrics with vLLM's names, labels and buckets, so that its dashboards and scaling rules work unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Histogram as LabelledHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.interface.engine_config import EngineConfig, SpeculativeConfig
from octavo.interface.messages import SchedulerStats
from octavo.metrics.histogram import Histogram, bounds
from octavo.metrics.states import StateMetrics
from octavo.metrics.stats import FINISH_REASONS, IterationStats, Progress, cache_config_labels
from octavo.metrics.tenants import TenantTokens

REJECTED_QUEUE_FULL = "max_num_queued_reqs"

_REQUEST_SECONDS = bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_TOKEN_SECONDS = bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_FIRST_TOKEN_SECONDS = bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_STEP_SECONDS = bounds("0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30")
_STEP_TOKENS = bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
_LENGTHS: tuple[float, ...] = ()  # 1, 2, 5, 10, ... up to max_model_len

# Name and text of each metric, by the field of the statistics that it shows.
_STEP_GAUGES = {  # of SchedulerStats
    "num_running_reqs": ("vllm:num_requests_running", "Number of running sequences"),
    "num_waiting_reqs": ("vllm:num_requests_waiting", "Number of waiting sequences"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "KV cache usage, from 0 to 1"),
    "retained_blocks": (
        "octavo:retained_blocks",
        "Number of free KV cache blocks that are evicted after others because requests ask for that",
    ),
}
_STEP_COUNTERS = {  # of SchedulerStats
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens"),
    "num_preemptions": ("vllm:num_preemptions", "Number of preemptions"),
    "num_thoughts_ended": (
        "octavo:thinking_budget_reached",
        "Answers whose thoughts were ended because they had used up the request's budget",
    ),
}
_DRAFT_COUNTERS = {  # of SpecDecodeStats
    "num_drafts": (
        "vllm:spec_decode_num_drafts",
        "Number of drafts: steps of a sequence in which draft tokens were verified",
    ),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens"),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Number of accepted draft tokens"),
}
_TOKEN_COUNTERS = {  # of IterationStats
    "num_prompt_tokens": ("vllm:prompt_tokens", "Number of prompt tokens of started requests"),
    "num_cached_tokens": ("vllm:prompt_tokens_cached", "Number of cached prompt tokens"),
    "num_generation_tokens": ("vllm:generation_tokens", "Number of generated tokens"),
}
_TOKEN_HISTOGRAMS = {  # of IterationStats
    "step_tokens": ("vllm:iteration_tokens_total", "Tokens per engine step", _STEP_TOKENS),
    "first_token_seconds": ("vllm:time_to_first_token_seconds", "Time to first token in seconds", _FIRST_TOKEN_SECONDS),
    "inter_token_seconds": ("vllm:inter_token_latency_seconds", "Inter-token latency in seconds", _TOKEN_SECONDS),
}
_SEQUENCE_HISTOGRAMS = {  # of FinishedSample
    "num_prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens per sequence", _LENGTHS),
    "num_generation_tokens": ("vllm:request_generation_tokens", "Generated tokens per sequence", _LENGTHS),
    "num_computed_tokens": (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens per sequence that were computed, not cached",
        _LENGTHS,
    ),
    "num_preemptions": ("vllm:request_num_preemptions", "Preemptions per sequence", bounds("1 2 3 4 5 10 20")),
    "max_tokens": ("vllm:request_params_max_tokens", "Request parameter max_tokens", _LENGTHS),
    "e2e": ("vllm:e2e_request_latency_seconds", "End-to-end latency in seconds", _REQUEST_SECONDS),
    "queued": (
        "vllm:request_queue_time_seconds",
        "Time in the queue, from arrival to the first step, in seconds",
        _REQUEST_SECONDS,
    ),
    "inference": ("vllm:request_inference_time_seconds", "Time of prefill and decode in seconds", _REQUEST_SECONDS),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "Time from the first step to the first token in seconds",
        _REQUEST_SECONDS,
    ),
    "decode": (
        "vllm:request_decode_time_seconds",
        "Time from the first to the last token in seconds",
        _REQUEST_SECONDS,
    ),
    "time_per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a sequence, after its first, in seconds",
        _TOKEN_SECONDS,
    ),
}
_REQUEST_HISTOGRAMS = {  # of FinishedRequest
    "n": ("vllm:request_params_n", "Request parameter n", bounds("1 2 5 10 20")),
    "max_num_generation_tokens": (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of the longest sequence of a request",
        _LENGTHS,
    ),
}
_GAUGES = {  # by their label
    "phase": ("octavo:startup_seconds", "Seconds of a startup phase: fetch, import, load; ready: of all"),
    "kind": ("octavo:weight_bytes", "Memory of the weights in bytes, by kind: int4, bfloat16"),
    "part": ("octavo:memory_bytes", "Memory that the engine may use in bytes, by what it is for"),
    "reason": (
        "octavo:unrecorded_steps",
        "1 if a CPU's steps are not recorded but called one operation at a time, and what the reason is",
    ),
}

_STORED = {True: "stored", False: "failed"}  # outcomes, by whether a response could be stored
_Kind = TypeVar("_Kind", Counter, Gauge)


def buckets_1_2_5(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``limit``."""
    buckets, power = [], 1
    while power <= limit:
        buckets += [factor * power for factor in (1, 2, 5) if factor * power <= limit]
        power *= 10
    return buckets


class EngineMetrics:
    """The engine's metrics, in a registry of their own: two servers in one process do not mix."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self._max_model_len = config.scheduler.max_model_len
        self._step_gauges = self._each(Gauge, _STEP_GAUGES)
        self._step_counters = self._each(Counter, _STEP_COUNTERS)
        self._token_counters = self._each(Counter, _TOKEN_COUNTERS)
        self._token_histograms = self._histograms(_TOKEN_HISTOGRAMS)
        self._sequence_histograms = self._histograms(_SEQUENCE_HISTOGRAMS)
        self._request_histograms = self._histograms(_REQUEST_HISTOGRAMS)
        self._count_requests()
        self._count_steps(config)
        self._spec_decode: dict[str, Counter] = {}
        self._accepted_at: list[Counter] = []
        self._count_drafts(config.speculative)
        self._adapters: Gauge | None = None
        self._adapter_names = (",", ",")
        if config.lora is not None:
            self._max_adapters = str(config.lora.max_loras)
            self._adapters = Gauge(
                "vllm:lora_requests_info",
                "LoRA adapters with running and with waiting sequences, separated by commas; the time of the change",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                registry=self.registry,
            )
            self._record_adapters([], [])
        self._states = StateMetrics(self._family, self._labels) if config.model.is_recurrent else None
        self._tenants = TenantTokens(self._labels)
        self.registry.register(self._tenants)
        self.registry.register(_AtScrape(lambda: _aliases(self)))

    def _count_requests(self) -> None:
        """Create the metrics of requests, by source of their tokens and by how they end."""
        by_reason = self._family(
            Gauge, "vllm:num_requests_waiting_by_reason", "Number of waiting sequences by reason", "reason"
        )
        self._waiting_capacity = by_reason.labels(**self._labels, reason="capacity")
        sources = self._family(
            Counter, "vllm:prompt_tokens_by_source", "Number of prompt tokens by source: computed or cached", "source"
        )
        self._computed, self._cached = (
            sources.labels(**self._labels, source=source) for source in ("local_compute", "local_cache_hit")
        )
        success = self._family(
            Counter, "vllm:request_success", "Number of finished sequences by finish reason", "finished_reason"
        )
        self._success = {r: success.labels(**self._labels, finished_reason=r) for r in FINISH_REASONS}
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of requests rejected by a queue limit",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejections.labels(model_name=self.model_name, reason=REJECTED_QUEUE_FULL)
        stripped = self._family(
            Counter, "octavo:prompt_lines_stripped", "Number of lines for billing left out of instructions"
        )
        self._stripped = stripped.labels(**self._labels)
        too_long = self._family(
            Counter, "octavo:prompt_too_long", "Number of requests refused because the model's context is too short"
        )
        self._too_long = too_long.labels(**self._labels)
        self._chat_format = self._family(
            Gauge,
            "octavo:chat_format_info",
            "Format of tool calls, generic where the chat template shows none that is known (always 1)",
            "tool_format",
        )
        hits = self._family(
            Counter, "octavo:replay_hits", "Number of prompts whose last answer stands in them as it was spoken"
        )
        self._replay_hits = hits.labels(**self._labels)
        self._replay_misses = self._family(
            Counter,
            "octavo:replay_misses",
            "Number of prompts whose last answer does not stand in them as it was spoken: unknown is not remembered, "
            "changed is what the chat template or the client writes otherwise",
            "why",
        )
        self._calls = self._family(Counter, "octavo:tool_calls", "Number of tool calls in answers, by format", "format")
        self._malformed = self._family(
            Counter,
            "octavo:tool_calls_malformed",
            "Number of texts that began as a tool call and were returned as content, by format",
            "format",
        )
        unknown = self._family(
            Counter, "octavo:tool_calls_unknown", "Number of tool calls whose name no tool of the request has"
        )
        self._unknown = unknown.labels(**self._labels)
        questions = self._family(
            Counter, "octavo:decisions_questions", "Number of questions answered in /v1/decisions, refusals included"
        )
        self._questions = questions.labels(**self._labels)
        stored = self._family(
            Counter, "octavo:responses_stored", "Number of responses by whether they could be stored", "outcome"
        )
        self._stored = {ok: stored.labels(**self._labels, outcome=name) for ok, name in _STORED.items()}

    def _count_steps(self, config: EngineConfig) -> None:
        """Create Octavo's own metrics. A step that computes prompt tokens is a prefill step."""
        steps = self._family(
            LabelledHistogram,
            "octavo:step_seconds",
            "Duration of an engine step in seconds",
            "kind",
            buckets=_STEP_SECONDS,
        )
        tokens = self._family(
            Counter, "octavo:step_tokens", "Number of tokens computed, by kind of step", "kind", "tokens"
        )
        self._steps = {kind: steps.labels(**self._labels, kind=kind) for kind in ("prefill", "decode")}
        self._step_tokens = {
            (kind, what): tokens.labels(**self._labels, kind=kind, tokens=what)
            for kind in ("prefill", "decode")
            for what in ("prompt", "generation")
        }
        self._gauges = {label: self._family(Gauge, name, text, label) for label, (name, text) in _GAUGES.items()}
        limit = self._family(Gauge, "octavo:max_num_seqs", "Maximum number of sequences per step (--max-num-seqs)")
        limit.labels(**self._labels).set(config.scheduler.max_num_seqs)

    # Creating metrics.

    def _family(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        return kind(name, text, (*self._labels, *labels), registry=self.registry, **options)

    def _each(self, kind: type[_Kind], rows: Mapping[str, tuple[str, str]]) -> dict[str, _Kind]:
        return {field: self._family(kind, *row).labels(**self._labels) for field, row in rows.items()}

    def _histograms(self, rows: Mapping[str, tuple[str, str, Sequence[float]]]) -> dict[str, Histogram]:
        lengths = buckets_1_2_5(self._max_model_len)
        return {
            field: Histogram(name, text, self._labels, buckets or lengths, self.registry)
            for field, (name, text, buckets) in rows.items()
        }

    # Recording.

    def _count_drafts(self, speculative: SpeculativeConfig) -> None:
        """Start to count drafts, if there are any."""
        if self._spec_decode or not speculative.is_on:
            return
        self._spec_decode = self._each(Counter, _DRAFT_COUNTERS)
        at = self._family(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of accepted draft tokens by position in the draft, from 0",
            "position",
        )
        positions = range(speculative.num_speculative_tokens)
        self._accepted_at = [at.labels(**self._labels, position=str(position)) for position in positions]

    def record_cache(self, config: EngineConfig, num_blocks: int, blocks_of_longest: int) -> None:
        """The KV cache that the core has made; called once. See `cache_config_labels`. ``config``: the core's, which
        says whether tokens are guessed where that depends on the device."""
        self._count_drafts(config.speculative)
        labels = {"engine": "0", **cache_config_labels(config, num_blocks, blocks_of_longest)}
        info = Gauge("vllm:cache_config_info", "KV cache configuration and size", tuple(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def record_memory(self, weight_bytes: Mapping[str, int], shares: Mapping[str, int]) -> None:
        """Record, in bytes, the weights that the core has loaded, by kind, and all memory that it may use, by
        purpose."""
        for label, sizes in ("kind", weight_bytes), ("part", shares):
            for value, size in sizes.items():
                self._set(label, value, size)

    def _set(self, label: str, value: str, number: float) -> None:
        self._gauges[label].labels(**self._labels, **{label: value}).set(number)

    def record_step(self, stats: SchedulerStats) -> None:
        """One step's scheduler statistics."""
        for field, gauge in self._step_gauges.items():
            gauge.set(getattr(stats, field))
        self._waiting_capacity.set(stats.num_waiting_reqs)
        _add(self._step_counters, stats)
        if stats.spec_decode is not None:
            _add(self._spec_decode, stats.spec_decode)
            for counter, count in zip(self._accepted_at, stats.spec_decode.num_accepted_per_pos, strict=False):
                counter.inc(count)
        if stats.states is not None and self._states is not None:
            self._states.record(stats.states)
        if stats.running_adapters is not None and stats.waiting_adapters is not None:
            self._record_adapters(stats.running_adapters, stats.waiting_adapters)
        if stats.recording_obstacle is not None:
            self._set("reason", stats.recording_obstacle, 1)
        if stats.num_prompt_tokens or stats.num_generation_tokens:
            kind = "prefill" if stats.num_prompt_tokens else "decode"
            self._steps[kind].observe(stats.step_time)
            self._step_tokens[kind, "prompt"].inc(stats.num_prompt_tokens)
            self._step_tokens[kind, "generation"].inc(stats.num_generation_tokens)

    def _record_adapters(self, running: list[str], waiting: list[str]) -> None:
        names = ",".join(sorted(running)), ",".join(sorted(waiting))
        if self._adapters is not None and names != self._adapter_names:
            self._adapter_names = names
            self._adapters.clear()
            self._adapters.labels(self._max_adapters, *names).set_to_current_time()

    def record_iteration(self, stats: IterationStats) -> None:
        """One step's results, as the requests saw them."""
        _add(self._token_counters, stats)
        self._computed.inc(stats.num_prompt_tokens - stats.num_cached_tokens)
        self._cached.inc(stats.num_cached_tokens)
        self._tenants.add(stats.tenants)
        for field, histogram in self._token_histograms.items():
            histogram.observe_all(getattr(stats, field))
        for sample in stats.finished:
            self._success[sample.reason].inc()
            _observe(self._sequence_histograms, sample)
        for request in stats.finished_requests:
            _observe(self._request_histograms, request)

    def record_rejection(self, reason: str) -> None:
        """A request refused with 429; ``reason``: the limit's name."""
        self._rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def record_stored(self, stored: bool) -> None:
        """A response that was to be stored, and whether it could be."""
        self._stored[stored].inc()

    def record_questions(self, count: int) -> None:
        """Questions of a request for decisions, once they are answered."""
        self._questions.inc(count)

    def record_too_long(self) -> None:
        """A request refused because its prompt, or that and its answer, exceed the context."""
        self._too_long.inc()

    def record_tool_format(self, name: str) -> None:
        """The format of calls that the server has found."""
        self._chat_format.labels(**self._labels, tool_format=name).set(1)

    def record_stripped_lines(self, count: int) -> None:
        """Lines that were left out of a prompt, since they differ in every request."""
        self._stripped.inc(count)

    def record_replay(self, why: str | None) -> None:
        """A prompt with answers: whether the last one stands in it as it was spoken, or why not."""
        (self._replay_hits if why is None else self._replay_misses.labels(**self._labels, why=why)).inc()

    def record_calls(self, form: str, calls: int, malformed: int, unknown: int) -> None:
        """The tool calls of an answer that is complete, in the format ``form``: all of them, texts that began as one,
        and calls whose name no tool has."""
        for counter, count in ((self._calls, calls), (self._malformed, malformed)):
            if count:
                counter.labels(**self._labels, format=form).inc(count)
        self._unknown.inc(unknown)

    def record_startup(self, phase: str, seconds: float) -> None:
        """The duration of one phase of the start."""
        self._set("phase", phase, seconds)

    def watch_device_memory(self, read: Callable[[], tuple[int, int]]) -> None:
        """Export the used and the total bytes of the engine's device; every scrape calls ``read()`` for both."""
        self.registry.register(_AtScrape(lambda: _device_memory(read, self._labels)))

    def watch_progress(self, read: Callable[[], Progress]) -> None:
        """Export the progress that ``read()`` returns; every scrape calls it."""
        self.registry.register(_AtScrape(lambda: _progress(read(), self._labels)))

    def watch_core_process(self, pid: int) -> None:
        """CPU and memory of the core process beside those of this one."""
        ProcessCollector(namespace="octavo_core", pid=lambda: pid, registry=self.registry)

    def expose(self, names: Sequence[str] = ()) -> bytes:
        """Prometheus' text format. ``names``: of samples, which come alone then."""
        return generate_latest(self.registry.restricted_registry(names) if names else self.registry)


class _AtScrape(Collector):
    """Metrics that are computed when they are read."""

    def __init__(self, compute: Callable[[], Iterable[Metric]]) -> None:
        self._compute = compute

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._compute()


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge


def _device_memory(read: Callable[[], tuple[int, int]], labels: dict[str, str]) -> Iterator[Metric]:
    for name, value in zip(("used", "total"), read(), strict=True):
        yield _gauge(f"octavo:device_memory_{name}_bytes", f"Device memory in bytes, {name}", labels, value)


def _progress(now: Progress, labels: dict[str, str]) -> Iterator[Metric]:
    """The values behind the health routes, so that a scrape shows a stall whatever the probes do."""
    for name, text, value in (
        ("alive", "1 while the engine is live (/livez)", now.alive),
        ("ready", "1 while the engine is ready for requests (/readyz)", now.ready),
        ("heartbeat_age_seconds", "Seconds since the last heartbeat of the engine core", now.heartbeat_age),
        ("stalled_seconds", "Seconds since the engine core last finished a step, while it has work", now.stalled),
    ):
        yield _gauge(f"octavo:engine_{name}", text, labels, value)
    names, values = list(labels), list(labels.values())
    steps = CounterMetricFamily("octavo:engine_steps", "Number of finished engine steps", labels=names)
    steps.add_metric(values, now.num_steps)
    yield steps
    names = [*names, "rank"]
    age = GaugeMetricFamily(
        "octavo:rank_heartbeat_age_seconds", "Seconds since the last heartbeat of a rank", labels=names
    )
    done = CounterMetricFamily("octavo:rank_steps", "Number of steps that a rank has finished", labels=names)
    for rank, (seconds, num_steps) in enumerate(now.ranks):
        age.add_metric([*values, str(rank)], seconds)
        done.add_metric([*values, str(rank)], num_steps)
    yield from (age, done)


def _aliases(metrics: EngineMetrics) -> Iterator[Metric]:
    """Deprecated metric names that dashboards still read."""
    counters, latencies = metrics._step_counters, metrics._token_histograms["inter_token_seconds"]
    queries, hits = (_value(counters[f"prefix_cache_{what}"]) for what in ("queries", "hits"))
    rate, usage = hits / queries if queries else 0.0, _value(metrics._step_gauges["kv_cache_usage"])
    for name, text, value in (
        ("vllm:gpu_cache_usage_perc", "Deprecated name of vllm:kv_cache_usage_perc", usage),
        ("vllm:gpu_prefix_cache_hit_rate", "Prefix cache hit rate since the start, from 0 to 1", rate),
        ("vllm:cpu_prefix_cache_hit_rate", "Prefix cache hit rate since the start, from 0 to 1", rate),
    ):
        yield _gauge(name, text, metrics._labels, value)
    text = "Deprecated name of vllm:inter_token_latency_seconds"
    old = Metric("vllm:time_per_output_token_seconds", text, "histogram")
    for family in latencies.collect():
        for sample in family.samples:
            suffix = sample.name.removeprefix("vllm:inter_token_latency_seconds")
            old.add_sample(old.name + suffix, sample.labels, sample.value)
    yield old


def _value(instrument: Counter | Gauge) -> float:
    value: float = instrument._value.get()
    return value


def _add(counters: Mapping[str, Counter], stats: object) -> None:
    for field, counter in counters.items():
        counter.inc(getattr(stats, field))


def _observe(histograms: Mapping[str, Histogram], sample: object) -> None:
    for field, histogram in histograms.items():
        if (value := getattr(sample, field)) is not None:
            histogram.observe(value)
