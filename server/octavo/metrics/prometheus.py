"""Prometheus metrics with vLLM's names, labels and buckets, so that its dashboards and scaling rules work unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from octavo.metrics.histogram import Histogram
from octavo.metrics.stats import FINISH_REASONS, FinishedSample, IterationStats, Progress, cache_config_labels
from octavo.metrics.tenants import TenantTokens

TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SPEC_DECODE_COUNTERS = {  # by their names in `SpecDecodeStats`
    "num_drafts": "Number of drafts: steps of a sequence in which draft tokens were verified",
    "num_draft_tokens": "Number of draft tokens",
    "num_accepted_tokens": "Number of accepted draft tokens",
}
REJECTED_QUEUE_FULL = "max_num_queued_reqs"

_REQUEST_SECONDS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_TOKEN_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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
        lengths = buckets_1_2_5(config.scheduler.max_model_len)

        # Gauges.
        self._running = self._gauge("vllm:num_requests_running", "Number of running sequences")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Number of waiting sequences")
        by_reason = self._family(
            Gauge, "vllm:num_requests_waiting_by_reason", "Number of waiting sequences by reason", ("reason",)
        )
        self._waiting_capacity = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred").set(0)
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache usage, from 0 to 1")
        sleep = self._family(
            Gauge, "vllm:engine_sleep_state", "Sleep state of the engine: 1 for the current state", ("sleep_state",)
        )
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(**self._labels, sleep_state=state).set(state == "awake")

        # Counters.
        self._prefix_queries = self._counter("vllm:prefix_cache_queries", "Prefix cache queries, in tokens")
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens")
        for other, text in (("external_prefix_cache", "External prefix cache"), ("mm_cache", "Multi-modal cache")):
            self._counter(f"vllm:{other}_queries", f"{text} queries; always 0: there is no such cache")
            self._counter(f"vllm:{other}_hits", f"{text} hits; always 0: there is no such cache")
        self._preemptions = self._counter("vllm:num_preemptions", "Number of preemptions")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Number of prompt tokens of started requests")
        sources = self._family(
            Counter,
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source: computed or cached",
            ("source",),
        )
        self._by_source = {source: sources.labels(**self._labels, source=source) for source in TOKEN_SOURCES}
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Number of generated tokens")
        success = self._family(
            Counter, "vllm:request_success", "Number of finished sequences by finish reason", ("finished_reason",)
        )
        self._success = {r: success.labels(**self._labels, finished_reason=r) for r in FINISH_REASONS}
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of requests rejected by a queue limit",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejections.labels(model_name=model_name, reason=REJECTED_QUEUE_FULL)

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

        # Histograms.
        histogram = self._histogram
        self._h_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per sequence", lengths)
        self._h_generation = histogram("vllm:request_generation_tokens", "Generated tokens per sequence", lengths)
        self._h_max_generation = histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of the longest sequence of a request", lengths
        )
        self._h_iteration = histogram("vllm:iteration_tokens_total", "Tokens per engine step", _STEP_TOKENS)
        self._h_n = histogram("vllm:request_params_n", "Request parameter n", (1, 2, 5, 10, 20))
        self._h_max_tokens = histogram("vllm:request_params_max_tokens", "Request parameter max_tokens", lengths)
        self._h_preemptions = histogram("vllm:request_num_preemptions", "Preemptions per sequence", _PREEMPTIONS)
        self._h_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens per sequence that were computed, not cached",
            lengths,
        )
        self._h_ttft = histogram(
            "vllm:time_to_first_token_seconds", "Time to first token in seconds", _FIRST_TOKEN_SECONDS
        )
        self._h_itl = histogram("vllm:inter_token_latency_seconds", "Inter-token latency in seconds", _TOKEN_SECONDS)
        self._h_tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a sequence, after its first, in seconds",
            _TOKEN_SECONDS,
        )
        self._h_seconds = {
            name: histogram(f"vllm:{metric}_seconds", text, _REQUEST_SECONDS)
            for name, metric, text in (
                ("e2e", "e2e_request_latency", "End-to-end latency in seconds"),
                ("queued", "request_queue_time", "Time in the queue, from arrival to the first step, in seconds"),
                ("inference", "request_inference_time", "Time of prefill and decode in seconds"),
                ("prefill", "request_prefill_time", "Time from the first step to the first token in seconds"),
                ("decode", "request_decode_time", "Time from the first to the last token in seconds"),
            )
        }

        # Ours. A step that computes prompt tokens is a prefill step.
        steps = self._family(
            LabelledHistogram,
            "octavo:step_seconds",
            "Duration of an engine step in seconds",
            ("kind",),
            buckets=_STEP_SECONDS,
        )
        tokens = self._family(
            Counter, "octavo:step_tokens", "Number of tokens computed, by kind of step", ("kind", "tokens")
        )
        self._steps = {kind: steps.labels(**self._labels, kind=kind) for kind in ("prefill", "decode")}
        self._step_tokens = {
            (kind, what): tokens.labels(**self._labels, kind=kind, tokens=what)
            for kind in ("prefill", "decode")
            for what in ("prompt", "generation")
        }
        self._startup = self._family(
            Gauge,
            "octavo:startup_seconds",
            "Seconds of a startup phase: fetch, import, load; ready: of all",
            ("phase",),
        )
        self._weights = self._family(
            Gauge, "octavo:weight_bytes", "Memory of the weights in bytes, by kind: int4, bfloat16", ("kind",)
        )
        self._memory = self._family(
            Gauge, "octavo:memory_bytes", "Memory that the engine may use in bytes, by what it is for", ("part",)
        )
        self._obstacle = self._family(
            Gauge,
            "octavo:unrecorded_steps",
            "1 if a CPU's steps are not recorded but called one operation at a time, and what the reason is",
            ("reason",),
        )
        limit = self._gauge("octavo:max_num_seqs", "Maximum number of sequences per step (--max-num-seqs)")
        limit.set(config.scheduler.max_num_seqs)
        self._tenants = TenantTokens(self._labels)
        self.registry.register(self._tenants)
        self.registry.register(_Aliases(self))

    # Creating metrics.

    def _family(self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **options: Any) -> Any:
        return kind(name, text, (*self._labels, *labels), registry=self.registry, **options)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge: Gauge = self._family(Gauge, name, text).labels(**self._labels)
        return gauge

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._family(Counter, name, text).labels(**self._labels)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, self._labels, buckets, self.registry)

    # Recording.

    def _count_drafts(self, speculative: SpeculativeConfig) -> None:
        """Start to count drafts, if there are any."""
        if self._spec_decode or not speculative.is_on:
            return
        for name, text in SPEC_DECODE_COUNTERS.items():
            self._spec_decode[name] = self._counter(f"vllm:spec_decode_{name}", text)
        at = self._family(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of accepted draft tokens by position in the draft, from 0",
            ("position",),
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
        for kind, size in weight_bytes.items():
            self._weights.labels(**self._labels, kind=kind).set(size)
        for part, size in shares.items():
            self._memory.labels(**self._labels, part=part).set(size)

    def record_step(self, stats: SchedulerStats) -> None:
        """One step's scheduler statistics."""
        self._running.set(stats.num_running_reqs)
        self._waiting.set(stats.num_waiting_reqs)
        self._waiting_capacity.set(stats.num_waiting_reqs)
        self._kv_usage.set(stats.kv_cache_usage)
        self._prefix_queries.inc(stats.prefix_cache_queries)
        self._prefix_hits.inc(stats.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions)
        if stats.spec_decode is not None:
            for name, counter in self._spec_decode.items():
                counter.inc(getattr(stats.spec_decode, name))
            for counter, count in zip(self._accepted_at, stats.spec_decode.num_accepted_per_pos, strict=False):
                counter.inc(count)
        if stats.running_adapters is not None and stats.waiting_adapters is not None:
            self._record_adapters(stats.running_adapters, stats.waiting_adapters)
        if stats.recording_obstacle is not None:
            self._obstacle.labels(**self._labels, reason=stats.recording_obstacle).set(1)
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
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._by_source["local_compute"].inc(stats.num_prompt_tokens - stats.num_cached_tokens)
        self._by_source["local_cache_hit"].inc(stats.num_cached_tokens)
        self._cached_tokens.inc(stats.num_cached_tokens)
        self._generation_tokens.inc(stats.num_generation_tokens)
        self._tenants.add(stats.tenants)
        if stats.num_prompt_tokens or stats.num_generation_tokens:
            self._h_iteration.observe(stats.num_prompt_tokens + stats.num_generation_tokens)
        self._h_ttft.observe_all(stats.first_token_seconds)
        self._h_itl.observe_all(stats.inter_token_seconds)
        for sample in stats.finished:
            self._record_finished(sample)
        for request in stats.finished_requests:
            self._h_n.observe(request.params.n)
            self._h_max_generation.observe(request.max_num_generation_tokens)

    def _record_finished(self, sample: FinishedSample) -> None:
        self._success[sample.reason].inc()
        for name, histogram in self._h_seconds.items():
            if (seconds := getattr(sample, name)) is not None:
                histogram.observe(seconds)
        if (seconds := sample.time_per_output_token) is not None:
            self._h_tpot.observe(seconds)
        self._h_prompt.observe(sample.num_prompt_tokens)
        self._h_computed.observe(sample.num_prompt_tokens - sample.num_cached_tokens)
        self._h_generation.observe(sample.num_generation_tokens)
        self._h_preemptions.observe(sample.num_preemptions)
        if sample.params.max_tokens is not None:
            self._h_max_tokens.observe(sample.params.max_tokens)

    def record_rejection(self, reason: str) -> None:
        """A request refused with 429; ``reason``: the limit's name."""
        self._rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def record_startup(self, phase: str, seconds: float) -> None:
        """The duration of one phase of the start."""
        self._startup.labels(**self._labels, phase=phase).set(seconds)

    def watch_device_memory(self, read: Callable[[], tuple[int, int]]) -> None:
        """``read()`` gives the bytes in use on the engine's device and all there are; asked at every scrape."""
        self.registry.register(_DeviceMemory(read, self._labels))

    def watch_progress(self, read: Callable[[], Progress]) -> None:
        """``read()`` gives a `Progress`; asked at every scrape."""
        self.registry.register(_Progress(read, self._labels))

    def watch_core_process(self, pid: int) -> None:
        """CPU and memory of the core process beside those of this one."""
        ProcessCollector(namespace="octavo_core", pid=lambda: pid, registry=self.registry)

    def expose(self, names: Sequence[str] = ()) -> bytes:
        """Prometheus' text format. ``names``: of samples, which come alone then."""
        return generate_latest(self.registry.restricted_registry(names) if names else self.registry)


class _DeviceMemory(Collector):
    def __init__(self, read: Callable[[], tuple[int, int]], labels: dict[str, str]) -> None:
        self._read, self._labels = read, labels

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in zip(("used", "total"), self._read(), strict=True):
            metric = GaugeMetricFamily(
                f"octavo:device_memory_{name}_bytes",
                f"Device memory in bytes, {name}",
                labels=list(self._labels),
            )
            metric.add_metric(list(self._labels.values()), value)
            yield metric


class _Progress(Collector):
    """The values behind the health routes, so that a scrape shows a stall whatever the probes do."""

    def __init__(self, read: Callable[[], Progress], labels: dict[str, str]) -> None:
        self._read, self._labels = read, labels

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        labels, values = list(self._labels), list(self._labels.values())
        for name, text, value in (
            ("alive", "1 while the engine is live (/livez)", now.alive),
            ("ready", "1 while the engine is ready for requests (/readyz)", now.ready),
            ("heartbeat_age_seconds", "Seconds since the last heartbeat of the engine core", now.heartbeat_age),
            ("stalled_seconds", "Seconds since the engine core last finished a step, while it has work", now.stalled),
        ):
            gauge = GaugeMetricFamily(f"octavo:engine_{name}", text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        steps = CounterMetricFamily("octavo:engine_steps", "Number of finished engine steps", labels=labels)
        steps.add_metric(values, now.num_steps)
        yield steps
        labels = [*labels, "rank"]
        age = GaugeMetricFamily(
            "octavo:rank_heartbeat_age_seconds", "Seconds since the last heartbeat of a rank", labels=labels
        )
        done = CounterMetricFamily("octavo:rank_steps", "Number of steps that a rank has finished", labels=labels)
        for rank, (seconds, num_steps) in enumerate(now.ranks):
            age.add_metric([*values, str(rank)], seconds)
            done.add_metric([*values, str(rank)], num_steps)
        yield from (age, done)


class _Aliases(Collector):
    """Deprecated metric names that dashboards still read."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        queries, hits = _value(metrics._prefix_queries), _value(metrics._prefix_hits)
        rate = hits / queries if queries else 0.0
        labels = list(metrics._labels)
        for name, text, value in (
            ("vllm:gpu_cache_usage_perc", "Deprecated name of vllm:kv_cache_usage_perc", _value(metrics._kv_usage)),
            ("vllm:gpu_prefix_cache_hit_rate", "Prefix cache hit rate since the start, from 0 to 1", rate),
            ("vllm:cpu_prefix_cache_hit_rate", "Prefix cache hit rate since the start, from 0 to 1", rate),
        ):
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(list(metrics._labels.values()), value)
            yield gauge
        old = Metric(
            "vllm:time_per_output_token_seconds", "Deprecated name of vllm:inter_token_latency_seconds", "histogram"
        )
        for family in metrics._h_itl.collect():
            for sample in family.samples:
                suffix = sample.name.removeprefix("vllm:inter_token_latency_seconds")
                old.add_sample(old.name + suffix, sample.labels, sample.value)
        yield old


def _value(instrument: Counter | Gauge) -> float:
    value: float = instrument._value.get()
    return value
