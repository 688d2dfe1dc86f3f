"""``octavo bench serve``: load any OpenAI-compatible server and print throughput and latencies."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

import uvloop

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.load import (
    add_arrival_arguments,
    add_sampling_arguments,
    add_server_arguments,
    check_load,
    connection_of,
    find_model,
    find_tokenizer,
    measure,
    pairs,
    sampling_note,
)
from octavo.bench.report import METRICS, Report, about_run, parse_goodput, parse_percentiles, plot_timeline
from octavo.bench.spec_decode import read_counts
from octavo.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench serve`."""
    add_server_arguments(parser)
    add_dataset_arguments(parser)
    add_arrival_arguments(parser)
    add_sampling_arguments(parser)
    out = parser.add_argument_group("results")
    out.add_argument("--label", help="Name of this run in the JSON and its file name (default: the backend)")
    out.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Report the rate of requests that meet these targets (default: none)",
    )
    out.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"Metrics to print, comma separated: {', '.join(METRICS)} (default: ttft,tpot,itl)",
    )
    out.add_argument("--metric-percentiles", default="99", help="Percentiles to print, comma separated (default: 99)")
    out.add_argument("--save-result", action="store_true", help="Write the figures as JSON (default: off)")
    out.add_argument(
        "--save-detailed", action="store_true", help="Also write the times and text of every request (default: off)"
    )
    out.add_argument("--append-result", action="store_true", help="Append to the JSON file (default: overwrite it)")
    out.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Further entries of the JSON (default: none)"
    )
    out.add_argument("--result-dir", default=".", help="Folder of the JSON file (default: the current one)")
    out.add_argument("--result-filename", help="Name of the JSON file (default: from the run's settings)")
    out.add_argument(
        "--plot-timeline",
        metavar="PNG",
        nargs="?",
        const="timeline.png",
        help="Draw a timeline of all requests into this file, timeline.png by default (default: off)",
    )


def run(args: argparse.Namespace) -> int:
    """Load the server and print a report. The exit status is 1 if no request succeeded. Raises ConfigError."""
    metrics = tuple(args.percentile_metrics.split(","))
    if unknown := set(metrics) - set(METRICS):
        raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}, got {', '.join(sorted(unknown))}")
    goodput, percentiles = parse_goodput(args.goodput), parse_percentiles(args.metric_percentiles)
    metadata = pairs(args.metadata, "--metadata")
    check_load(args)
    model, origin = find_model(args)
    tokenizer_id, tokenizer = find_tokenizer(args, origin)
    samples = load_dataset(args, tokenizer)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    if note := sampling_note(args):
        print(note, file=sys.stderr, flush=True)
    before = read_counts(connection_of(args))
    results, duration = uvloop.run(measure(args, samples, model, samples[:1] * args.num_warmups, count_tokens))
    after = read_counts(connection_of(args)) if before else None
    guessed = after.since(before) if before and after else None
    report = Report(results, duration, goodput, percentiles, metrics, args.max_concurrency, args.request_rate, guessed)
    print(report)
    for error in sorted({r.error for r in results if r.error})[:5]:
        print("error:", error)
    when = datetime.now().strftime("%Y%m%d-%H%M%S")
    if args.save_result or args.save_detailed or args.append_result:
        path = Path(args.result_dir) / (args.result_filename or _filename(args, model, when))
        about = about_run(args, model, tokenizer_id, when) | metadata
        report.save(path, about, args.save_detailed, args.append_result)
        print("saved", path)
    if args.plot_timeline:
        plot_timeline(report, Path(args.plot_timeline))
        print("drew", args.plot_timeline)
    return 0 if report.completed else 1


def _filename(args: argparse.Namespace, model: str, when: str) -> str:
    rate = f"{args.request_rate}qps"
    if args.ramp_up_strategy:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    users = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    return f"{args.label or args.backend}-{rate}{users}-{Path(model).name}-{when}.json"
