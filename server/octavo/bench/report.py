"""Compute figures from timed requests: the result block and JSON keys of vLLM, and a plot."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from octavo.bench.client import RequestResult
from octavo.bench.spec_decode import SpecDecodeCounts
from octavo.errors import ConfigError
from octavo.fetch.model_names import DEFAULT_MODEL

WIDTH = 50
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
    "e2el_including_client_queue": "Queue-inclusive End-to-end Latency",
}
_SHORT = {"client_queue_time": "Client Queue Time", "e2el_including_client_queue": "E2EL incl. Client Queue"}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as numpy's default. 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "e2el:3000"]`` in ms -> seconds by metric."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value) / 1000
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits[name] <= 0:
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {pair!r}")
    return limits


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``"50,99.9"`` -> (50.0, 99.9)."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value <= 100 for value in found):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100 with commas between, got {text!r}")
    return found


@dataclass(frozen=True)
class Report:
    """Figures of one run of requests that took ``duration`` seconds."""

    results: list[RequestResult]
    duration: float
    goodput: dict[str, float]
    percentiles: tuple[float, ...] = (99.0,)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    max_concurrency: int | None = None
    request_rate: float = math.inf
    spec_decode: SpecDecodeCounts | None = None

    @property
    def completed(self) -> list[RequestResult]:
        """Requests that ended without an error."""
        return [r for r in self.results if r.success]

    def seconds(self, metric: str) -> list[float]:
        """Every completed request's values of ``metric``, one of METRICS, in seconds."""
        done = self.completed
        if metric == "itl":
            return [gap for r in done for gap in r.itls]
        if metric == "tpot":
            return [tpot(r) for r in done if r.output_tokens > 1]
        values = {
            "ttft": [r.ttft for r in done],
            "e2el": [r.latency for r in done],
            "client_queue_time": [r.queued for r in done],
            "e2el_including_client_queue": [r.latency + r.queued for r in done],
        }
        return values[metric]

    @property
    def _told(self) -> list[str]:
        """The metrics that mean something in this run: without --max-concurrency no request waits in the client, and
        without a rate all come at once."""
        queue = {"client_queue_time": True, "e2el_including_client_queue": math.isfinite(self.request_rate)}
        return [m for m in METRICS if m in self.metrics and (m not in queue or (self.max_concurrency and queue[m]))]

    def to_dict(self) -> dict[str, Any]:
        """The figures under the names that vLLM's benchmark gives them; times in milliseconds."""
        done, duration = self.completed, self.duration
        total_input, total_output = sum(r.prompt_len for r in done), sum(r.output_tokens for r in done)
        peak_tokens, peak_requests = _peaks(done)
        figures: dict[str, Any] = {
            "duration": duration,
            "completed": len(done),
            "failed": len(self.results) - len(done),
            "total_input_tokens": total_input,
            "total_output_tokens": total_output,
            "request_throughput": len(done) / duration,
            "request_goodput": self._good() / duration if self.goodput else None,
            "output_throughput": total_output / duration,
            "total_token_throughput": (total_input + total_output) / duration,
            "max_output_tokens_per_s": peak_tokens,
            "max_concurrent_requests": peak_requests,
        }
        for metric in self._told:
            values = [1000 * value for value in self.seconds(metric)]
            figures[f"mean_{metric}_ms"] = sum(values) / len(values) if values else 0.0
            figures[f"median_{metric}_ms"] = percentile(values, 50)
            figures[f"std_{metric}_ms"] = statistics.pstdev(values) if values else 0.0
            for p in self.percentiles:
                figures[f"p{p:g}_{metric}_ms"] = percentile(values, p)
        return figures | (self.spec_decode.to_dict() if self.spec_decode else {})

    def details(self) -> dict[str, Any]:
        """Every request's own lengths, times (seconds), text and error."""
        return {
            "input_lens": [r.prompt_len for r in self.results],
            "output_lens": [r.output_tokens for r in self.results],
            "ttfts": [r.ttft for r in self.results],
            "itls": [r.itls for r in self.results],
            "start_times": [r.start for r in self.results],
            "generated_texts": [r.text for r in self.results],
            "errors": [r.error for r in self.results],
        }

    def _good(self) -> int:
        def keeps(r: RequestResult) -> bool:
            values = {"ttft": r.ttft, "tpot": tpot(r), "e2el": r.latency}
            return all(values[name] <= limit for name, limit in self.goodput.items())

        return sum(keeps(r) for r in self.completed)

    def __str__(self) -> str:
        f = self.to_dict()
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [_line("Successful requests:", f["completed"]), _line("Failed requests:", f["failed"])]
        if self.max_concurrency is not None:
            lines.append(_line("Maximum request concurrency:", self.max_concurrency))
        if math.isfinite(self.request_rate):
            lines.append(_line("Request rate configured (RPS):", self.request_rate))
        lines += [
            _line("Benchmark duration (s):", f["duration"]),
            _line("Total input tokens:", f["total_input_tokens"]),
            _line("Total generated tokens:", f["total_output_tokens"]),
            _line("Request throughput (req/s):", f["request_throughput"]),
        ]
        if self.goodput:
            lines.append(_line("Request goodput (req/s):", f["request_goodput"]))
        lines += [
            _line("Output token throughput (tok/s):", f["output_throughput"]),
            _line("Peak output token throughput (tok/s):", f["max_output_tokens_per_s"]),
            _line("Peak concurrent requests:", f["max_concurrent_requests"]),
            _line("Total token throughput (tok/s):", f["total_token_throughput"]),
        ]
        for metric in self._told:
            short = _SHORT.get(metric, metric.upper())
            lines.append(f"{METRICS[metric]:-^{WIDTH}}")
            lines.append(_line(f"Mean {short} (ms):", f[f"mean_{metric}_ms"]))
            lines.append(_line(f"Median {short} (ms):", f[f"median_{metric}_ms"]))
            lines += [_line(f"P{p:g} {short} (ms):", f[f"p{p:g}_{metric}_ms"]) for p in self.percentiles]
        return "\n".join([*lines, *_spec_decode_lines(self.spec_decode), "=" * WIDTH])

    def record(self, about: dict[str, Any], detailed: bool = False) -> dict[str, Any]:
        """``about``, the figures, each request's latency and time in the client's queue, and, if ``detailed``, the rest
        about every request."""
        lists = {"latencies": [r.latency for r in self.results], "queue_times": [r.queued for r in self.results]}
        return about | self.to_dict() | lists | (self.details() if detailed else {})

    def save(self, path: Path, about: dict[str, Any], detailed: bool, append: bool) -> None:
        """Write `record` to ``path`` as one line of JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w") as file:
            file.write(json.dumps(self.record(about, detailed)) + "\n")


def about_run(args: argparse.Namespace, model: str, tokenizer_id: str | None, when: str) -> dict[str, Any]:
    """Return the description of a run in vLLM's JSON, under the same names."""
    about = {
        "date": when,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": tokenizer_id or DEFAULT_MODEL,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness if math.isfinite(args.burstiness) else "inf",
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy:
        about |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return about


def tpot(result: RequestResult) -> float:
    """Seconds per output token after the first; 0 when there was only one."""
    return (result.latency - result.ttft) / (result.output_tokens - 1) if result.output_tokens > 1 else 0.0


def _peaks(results: list[RequestResult]) -> tuple[float, int]:
    """Most events with output in any second since the first request, and most requests that were under way in one: as
    vLLM counts them, the second may exceed how many there were at any moment."""
    if not results:
        return 0.0, 0
    first = min(r.start for r in results)
    tokens: Counter[int] = Counter()
    requests: Counter[int] = Counter()
    for r in results:
        tokens.update(int(at) for at in accumulate(r.itls, initial=r.start + r.ttft - first))
        requests.update(range(int(r.start - first), int(r.start + r.latency - first) + 1))
    return float(max(tokens.values())), max(requests.values())


def _spec_decode_lines(counts: SpecDecodeCounts | None) -> list[str]:
    if counts is None:
        return []
    lines = [f"{'Speculative Decoding':-^{WIDTH}}"]
    lines += [_line("Acceptance rate (%):", counts.acceptance_rate)]
    lines += [_line("Acceptance length:", counts.acceptance_length)]
    lines += [_line("Drafts:", int(counts.drafts)), _line("Draft tokens:", int(counts.draft_tokens))]
    lines += [_line("Accepted tokens:", int(counts.accepted_tokens))]
    rates = counts.per_position_rates
    return lines + [_line(f"Acceptance at position {i} (%):", 100 * rate) for i, rate in enumerate(rates)]


def _line(label: str, value: float | int) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def plot_timeline(report: Report, path: Path) -> None:
    """A PNG: every request as a line from its start over its first token to its end, and tokens a second below."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot-timeline needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True, height_ratios=[3, 1])
    done = sorted(report.completed, key=lambda r: r.start)
    for row, r in enumerate(done):
        first, end = r.start + r.ttft, r.start + r.latency
        top.plot([r.start, first], [row, row], color="tab:orange", linewidth=1.5)
        top.plot([first, end], [row, row], color="tab:blue", linewidth=1.5)
    top.plot([], [], color="tab:orange", label="to the first token")
    top.plot([], [], color="tab:blue", label="to the last token")
    top.set_ylabel("request")
    top.legend(loc="lower right")
    counts: dict[int, int] = {}
    for r in done:
        at = r.start + r.ttft
        for gap in (0.0, *r.itls):
            at += gap
            counts[int(at)] = counts.get(int(at), 0) + 1
    bottom.bar(list(counts), list(counts.values()), width=1.0, align="edge", color="tab:green")
    bottom.set_ylabel("tokens / s")
    bottom.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
