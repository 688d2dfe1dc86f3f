"""``octavo run-batch -i IN.jsonl -o OUT.jsonl``: answer a file of requests, without a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from octavo.engine.args import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError, OctavoError
from octavo.fetch.model_names import check_model_name
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.flags.fields import from_flags, parse_int
from octavo.flags.server_flags import add_server_flags

if TYPE_CHECKING:
    from octavo.engine.core_launcher import CoreProcess, CoreProcesses
    from octavo.entrypoints.batches.lines import Limits, Line

# Flags of the server that have a meaning without one.
_SERVER_FLAGS = (
    "served_model_name",
    "max_logprobs",
    "chat_template",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "exclude_tools_when_tool_choice_none",
    "override_generation_config",
    "return_tokens_as_token_ids",
    "response_role",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "strict_json_schema",
    "tool_strict_level",
    "reasoning_parser",
    "preserve_reasoning",
    "reasoning_field",
    "clamp_max_tokens",
    "decisions_min_mass",
    "decisions_calibration",
    "embedding_pooling",
)
_EVERY = 5.0  # seconds between lines of progress where there is no terminal
_PIECE = 1 << 20  # bytes of a line that are looked at to count it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo run-batch`."""
    parser.usage = "%(prog)s -i IN.jsonl -o OUT.jsonl [MODEL] [flags]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="IN.jsonl",
        help="File of requests in OpenAI's batch format, one per line",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="OUT.jsonl",
        help="File for answers, one per line, in the order in which they finish. Answers of an earlier run are kept "
        "and not computed again",
    )
    parser.add_argument(
        "--concurrency",
        type=parse_int,
        metavar="N",
        help="Number of concurrent requests (default: twice --max-num-seqs)",
    )
    add_engine_flags(parser.add_argument_group("engine"))
    add_server_flags(parser.add_argument_group("answers"), only=_SERVER_FLAGS)


def run(namespace: argparse.Namespace) -> int:
    """Answers what is not answered yet. Raises OctavoError."""
    engine_args: EngineArgs = from_flags(EngineArgs, namespace)
    args: ServerArgs = from_flags(ServerArgs, namespace)
    if namespace.model_tag is not None:
        if engine_args.model not in (None, namespace.model_tag):
            raise ConfigError(f"two models are named, {namespace.model_tag} and {engine_args.model}: give one")
        engine_args.model = namespace.model_tag
    if namespace.concurrency is not None and namespace.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {namespace.concurrency}")
    args.check()
    engine_args._validate()
    check_model_name(engine_args.model, engine_args.download_dir)
    batch = _Batch(namespace.input_file, namespace.output_file)
    if not batch.total:
        print(f"{namespace.output_file} has an answer to each line already", file=sys.stderr)
        return 0
    from octavo.engine.core_launcher import start_cores
    from octavo.system.logging_setup import setup_logging

    setup_logging("warning", args.log_format, process="api")
    process = start_cores(engine_args)
    try:
        return _run(batch, engine_args, args, process, namespace.concurrency)
    finally:
        process.stop()
        batch.close()


def _run(
    batch: _Batch,
    engine_args: EngineArgs,
    args: ServerArgs,
    process: CoreProcess | CoreProcesses,
    concurrency: int | None,
) -> int:
    from octavo.engine.core_launcher import CoreOptions

    config = engine_args.create_engine_config()
    config.model.generation_config.update(args.override_generation_config)
    process.configure(config.to_dict(), CoreOptions(0, "warning", args.log_format))
    from octavo.entrypoints.offline import answer_offline
    from octavo.text.tokenizer import Tokenizer

    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
    width = concurrency or 2 * config.scheduler.max_num_seqs
    asyncio.run(answer_offline(config, args, tokenizer, process, batch.lines, width, batch.write))
    batch.report(last=True)
    return 0


class _Batch:
    """The files of a batch, and how far it is. Raises OctavoError for files that cannot be used."""

    def __init__(self, source: str, target: str) -> None:
        from octavo.entrypoints.batches.lines import done_in, split_lines

        self._source = source
        try:
            if os.path.exists(target) and os.path.samefile(source, target):
                raise ConfigError(f"input and output are the same file, {source}")
            with open(source, "rb") as file:
                lines = sum(1 for raw in split_lines(file, _PIECE) if raw.strip())
            self._output: BinaryIO = open(target, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
            self._output.seek(0)
            try:
                self._ids, self._custom_ids, length = done_in(self._output)
            except ValueError as error:
                raise ConfigError(
                    f"{target} is there, and its {error}: nothing was changed; give another --output-file, or remove it"
                ) from None
            self._output.truncate(length)
            self.total = lines - len(self._ids)
        except OSError as error:
            raise OctavoError(f"cannot use {error.filename}: {error.strerror or error}") from None
        if self._ids:
            print(f"{len(self._ids)} lines are answered already; {self.total} are left", file=sys.stderr)
        self._started = self._said = time.monotonic()
        self._answered = self._failed = 0

    def lines(self, limits: Limits) -> Iterator[Line]:
        """Yield the lines without an answer. A repeated custom_id does not identify a line."""
        from dataclasses import replace

        from octavo.entrypoints.batches.lines import read_lines

        with open(self._source, "rb") as file:
            for line in read_lines(file, limits):
                if line.is_repeated:
                    line = replace(line, custom_id=None)
                if line.id not in self._ids and line.custom_id not in self._custom_ids:
                    yield line

    def write(self, line: Line, output: bytes, succeeded: bool) -> None:
        """Append a line, whole: one call of the system."""
        view = memoryview(output)
        while view:
            view = view[self._output.write(view) :]
        self._answered += succeeded
        self._failed += not succeeded
        self.report()

    def report(self, last: bool = False) -> None:
        """Progress on stderr."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not last and now - self._said < (0.2 if terminal else _EVERY):
            return
        self._said, done = now, self._answered + self._failed
        text = (
            f"{done} of {self.total} lines, {self._failed} failed, {done / max(now - self._started, 1e-9):.1f} a second"
        )
        print(f"\r{text}\x1b[K" if terminal else text, end="" if terminal and not last else "\n", file=sys.stderr)

    def close(self) -> None:
        """Close the output."""
        self._output.close()
