"""``octavo bench sweep``: one server after another, each with other flags, each under the same loads.

Every configuration is measured several times, in turn and back again (A B B A): what else the machine does moves
figures, and so it moves those of all configurations alike.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import uvloop

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.load import (
    add_sampling_arguments,
    add_server_arguments,
    connection_of,
    find_model,
    find_tokenizer,
    load_tokenizer,
    measure,
    sampling_note,
)
from octavo.bench.local_server import local_server
from octavo.bench.report import Report, about_run
from octavo.bench.sweep_table import Row, print_table, save
from octavo.errors import ConfigError, OctavoError
from octavo.flags.parser import CommandParser
from octavo.flags.serve_flags import add_serve_flags
from octavo.system.suggestions import did_you_mean
from octavo.text.tokenizer import Tokenizer

MAX_CONFIGURATIONS = 1000  # a server each
SCRAPE_SECONDS = 0.5  # between looks at the metrics of a server that is measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench sweep`."""
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE[,VALUE...]",
        help="A flag of `octavo serve` and the values to compare: on and off for switches, none for the default. "
        "Several --param: every combination (default: only the flags after --)",
    )
    sweep.add_argument(
        "--users",
        default="1,5,10,20",
        metavar="N[,N...]",
        help="Numbers of concurrent users, one load each (default: 1,5,10,20)",
    )
    sweep.add_argument("--requests-per-user", type=int, default=3, help="Requests per user and load (default: 3)")
    sweep.add_argument("--repeats", type=int, default=2, help="Measurements of each configuration (default: 2)")
    sweep.add_argument(
        "--output-json", metavar="FILE", help="Write all figures to this file after each load (default: none)"
    )
    sweep.add_argument("--output-csv", metavar="FILE", help="Write the table as CSV (default: none)")
    sweep.add_argument("--output-markdown", metavar="FILE", help="Write the table as Markdown (default: none)")
    sweep.add_argument("--plot", metavar="PNG", help="Draw tokens per second and latencies (default: none)")
    add_server_arguments(parser)
    add_dataset_arguments(parser, input_len=128, count=False)
    add_sampling_arguments(parser)
    parser.add_argument("serve_args", nargs="*", help="Flags of `octavo serve` for all configurations, after --")
    parser.set_defaults(ignore_eos=True, request_rate=math.inf, burstiness=1.0, ramp_up_strategy=None, label=None)


@dataclass(frozen=True)
class Sweep:
    """Settings of a sweep."""

    configurations: tuple[dict[str, str], ...]  # values of --param, by name
    serve_args: tuple[str, ...]
    users: tuple[int, ...]
    requests_per_user: int
    repeats: int
    args: argparse.Namespace = field(repr=False)  # flags of the load
    url: str | None = None  # of a server that runs already

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sweep:
        """Raises ConfigError for whatever is wrong with any configuration, before a server is started."""
        try:
            users = tuple(int(text) for text in args.users.split(","))
        except ValueError:
            users = ()
        if not users or min(users) < 1:
            raise ConfigError(f"--users takes numbers of at least 1 with commas between, got {args.users!r}")
        for name in ("requests_per_user", "repeats"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
        configurations = tuple(configurations_of(args.param))
        if args.base_url and (args.param or args.serve_args):
            raise ConfigError("--base-url measures a server that runs: --param and flags after -- would start others")
        for configuration in configurations:
            _check([*args.serve_args, *flags_of(configuration)])
        return cls(
            configurations, tuple(args.serve_args), users, args.requests_per_user, args.repeats, args, args.base_url
        )

    @property
    def num_loads(self) -> int:
        """Return the total number of loads."""
        return len(self.configurations) * len(self.users) * self.repeats


def configurations_of(params: Sequence[str]) -> Iterator[dict[str, str]]:
    """Every combination of the values of --param, by name, as max_num_seqs. Raises ConfigError."""
    names, choices = [], []
    for text in params:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--param takes NAME=VALUE with commas between values, got {text!r}")
        if name in names:
            raise ConfigError(f"--param {name} is given twice: put all its values into one")
        names.append(name)
        choices.append(values.split(","))
    if (count := math.prod(map(len, choices))) > MAX_CONFIGURATIONS:
        raise ConfigError(f"--param: {count:,} combinations are more than {MAX_CONFIGURATIONS}; compare fewer values")
    for values_of_one in product(*choices):
        yield dict(zip(names, values_of_one, strict=True))


def flags_of(configuration: dict[str, str]) -> list[str]:
    """Flags of `octavo serve`. Raises ConfigError for a name that is none of its flags."""
    actions = {flag: action for action in _serve_parser()._actions for flag in action.option_strings}
    flags: list[str] = []
    for name, value in configuration.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in actions:
            raise ConfigError(f"--param {name}: `octavo serve` has no flag {flag}{did_you_mean(flag, list(actions))}")
        if value.lower() in ("none", "default"):
            continue
        if actions[flag].nargs != 0:
            flags += [flag, value]
        elif value.lower() in ("on", "true", "1", "yes"):
            flags.append(flag)
        elif value.lower() not in ("off", "false", "0", "no"):
            raise ConfigError(f"--param {name} takes on and off, got {value!r}")
        elif f"--no-{name.replace('_', '-')}" in actions:
            flags.append(f"--no-{name.replace('_', '-')}")
    return flags


def _serve_parser() -> CommandParser:
    parser = CommandParser(prog="octavo serve")
    add_serve_flags(parser)
    return parser


def _check(flags: list[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _serve_parser().parse_args(flags)
    except SystemExit:
        raise ConfigError(
            f"`octavo serve {shlex.join(flags)}`: {said.getvalue().partition('error: ')[2].strip()}"
        ) from None


def measure_all(sweep: Sweep, on_load: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """A row for each configuration and number of users, in order. ``on_load`` sees them after every load. A server that
    does not start, or takes none of the requests, is an error in its rows."""
    rows = [
        Row(dict(configuration), users, _command(sweep, configuration))
        for configuration in sweep.configurations
        for users in sweep.users
    ]
    tokenizer = _tokenizer(sweep)
    for repeat in range(sweep.repeats):
        order = list(range(len(sweep.configurations)))
        for index in order if repeat % 2 == 0 else reversed(order):
            own = rows[index * len(sweep.users) : (index + 1) * len(sweep.users)]
            for _ in _measure_one(sweep, sweep.configurations[index], own, repeat, tokenizer):
                on_load(rows)
    return rows


def _command(sweep: Sweep, configuration: dict[str, str]) -> str:
    return sweep.url or shlex.join(["octavo", "serve", *sweep.serve_args, *flags_of(configuration)])


def _tokenizer(sweep: Sweep) -> tuple[str | None, Tokenizer]:
    """Load the tokenizer, with the name of its model; None for the embedded model."""
    if sweep.url:
        return find_tokenizer(sweep.args, find_model(sweep.args)[1])
    name = sweep.args.tokenizer or _model_of(sweep)
    return name, load_tokenizer(name)


def _model_of(sweep: Sweep) -> str | None:
    namespace = _serve_parser().parse_args(list(sweep.serve_args))
    given = (getattr(namespace, name, None) for name in ("tokenizer", "model_tag", "model"))
    return next((str(name) for name in given if name), None)


def _measure_one(
    sweep: Sweep, configuration: dict[str, str], rows: list[Row], repeat: int, tokenizer: tuple[str | None, Tokenizer]
) -> Iterator[Row]:
    """Fill in ``rows``, the loads of one configuration, and yield each when it is done, or has failed."""
    with contextlib.ExitStack() as stack:
        url, error = sweep.url, ""
        if url is None:
            try:
                url = stack.enter_context(local_server([*sweep.serve_args, *flags_of(configuration)])).url
            except OctavoError as problem:
                error = str(problem)
        for row in rows:
            try:
                if url is not None:
                    row.add(*_measure_load(sweep, url, row.users, repeat, tokenizer))
            except OctavoError as problem:
                error = str(problem)
            row.error = error or row.error
            yield row


def _measure_load(
    sweep: Sweep, url: str, users: int, repeat: int, tokenizer: tuple[str | None, Tokenizer]
) -> tuple[Report, dict[str, Any]]:
    args = argparse.Namespace(**vars(sweep.args))
    args.base_url, args.max_concurrency, args.disable_tqdm = url, users, True
    args.num_prompts = users * sweep.requests_per_user + 1
    args.seed = sweep.args.seed + 1000 * repeat + users  # no prompt is in the cache from a load before
    (warmup, *samples), (model, _) = load_dataset(args, tokenizer[1]), find_model(args)
    args.num_prompts -= 1
    when = datetime.now().strftime("%Y%m%d-%H%M%S")
    with _Metrics(args) as metrics:
        results, seconds = uvloop.run(measure(args, samples, model, [warmup]))
    report = Report(results, seconds, {}, (99.0,), max_concurrency=users)
    return report, about_run(args, model, tokenizer[0], when) | metrics.figures()


class _Metrics:
    """The server's own metrics of a load: the peak of its KV cache, and the share of cached prompt tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._client = httpx.Client(**connection_of(args), trust_env=False, timeout=5)
        self._stop, self._peak = threading.Event(), 0.0
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Metrics:
        self._before = self._read()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._after = self._read()
        self._client.close()

    def _watch(self) -> None:
        while not self._stop.wait(SCRAPE_SECONDS):
            self._peak = max(self._peak, self._read().get("vllm:kv_cache_usage_perc", 0.0))

    def _read(self) -> dict[str, float]:
        """Sums over labels, by name; nothing from a server without such metrics."""
        found: dict[str, float] = {}
        with contextlib.suppress(httpx.HTTPError, ValueError):
            for line in self._client.get("/metrics").text.splitlines():
                if line.startswith("vllm:"):
                    name, _, value = line.partition("{")[0].partition(" ")[0], 0, line.rpartition(" ")[2]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def figures(self) -> dict[str, float]:
        """``kv_cache_peak`` and ``prefix_hit_rate``, from 0 to 1, where the server tells."""
        queries, hits = (
            self._after.get(name, 0.0) - self._before.get(name, 0.0)
            for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        )
        if not self._after:
            return {}
        return {"kv_cache_peak": self._peak, "prefix_hit_rate": hits / queries if queries else 0.0}


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write files. The exit status is 1 if a configuration has no figures."""
    from octavo.bench.progress import progress_bar

    sweep, file = Sweep.of(args), Path(args.output_json) if args.output_json else None
    if note := sampling_note(args):
        print(note, file=sys.stderr, flush=True)
    with progress_bar("Loads", sweep.num_loads, enabled=not args.disable_tqdm) as advance:

        def on_load(rows: list[Row]) -> None:
            advance()
            if file is not None and (file.is_file() or not file.exists()):  # whoever stops here keeps what there is
                save(rows, file, "json")

        rows = measure_all(sweep, on_load)
    print_table(rows)
    for row in {row.command: row for row in rows if row.error}.values():
        print(f"error: {row.command}: {row.error}")
    for path, kind in (
        (args.output_json, "json"),
        (args.output_csv, "csv"),
        (args.output_markdown, "markdown"),
        (args.plot, "plot"),
    ):
        if path:
            save(rows, Path(path), kind)
            print("saved", path)
    return 1 if any(not row.reports for row in rows) else 0
