"""``octavo serve [MODEL]``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time

from octavo.engine.args import EngineArgs
from octavo.engine.core_launcher import CoreOptions, CoreProcess
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError
from octavo.fetch.model_names import check_model_name
from octavo.flags.config_file import ConfigFile, with_config_file
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.flags.fields import from_flags
from octavo.flags.parser import CommandParser
from octavo.flags.server_flags import add_server_flags
from octavo.flags.vllm_flags import add_vllm_flags
from octavo.system.logging_setup import setup_logging

logger = logging.getLogger("octavo.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo serve`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    parser.add_argument(
        "--config", metavar="FILE.yaml", action=ConfigFile, default=argparse.SUPPRESS,
        help="Take flags from a YAML file whose keys are their names; the command line wins (default: none)",
    )  # fmt: skip
    add_engine_flags(parser.add_argument_group("engine"))
    add_server_flags(parser.add_argument_group("server"))
    add_vllm_flags(parser)
    if isinstance(parser, CommandParser):
        parser.takes_vllm_flags = True


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop. Raises OctavoError."""
    started = time.perf_counter()
    namespace = with_config_file(namespace)
    engine_args: EngineArgs = from_flags(EngineArgs, namespace)
    args: ServerArgs = from_flags(ServerArgs, namespace)
    if namespace.model_tag is not None:
        if engine_args.model is not None and engine_args.model != namespace.model_tag:
            raise ConfigError(f"two models are named, {namespace.model_tag} and {engine_args.model}: give one")
        engine_args.model = namespace.model_tag
    args.api_key = args.api_key or _keys_from_environment()
    args.check()
    engine_args._validate()
    for name in (engine_args.model, engine_args.tokenizer):
        check_model_name(name, engine_args.download_dir)
    setup_logging(args.log_level, args.log_format, process="api")
    # Importing torch takes the core longest of all: it begins at once, and what follows happens meanwhile.
    process = CoreProcess()
    gc.disable()  # what is imported now is no garbage
    try:
        return _serve(engine_args, args, process, started)
    finally:
        gc.enable()
        process.stop()


def _keys_from_environment() -> list[str]:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        if key := os.environ.get(name):
            return [key]
    return []


def _serve(engine_args: EngineArgs, args: ServerArgs, process: CoreProcess, started: float) -> int:
    phases = _Phases(started)
    config = engine_args.create_engine_config()
    config.model.generation_config.update(args.override_generation_config)
    process.configure(config.to_dict(), CoreOptions(args.watchdog_seconds, args.log_level, args.log_format))
    phases.done("finding the model")
    from octavo.text.tokenizer import Tokenizer

    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
    phases.done("loading the tokenizer")
    import uvloop

    from octavo.entrypoints.server import allow_many_connections, bind, quiet_access_log, serve

    phases.done("importing the server")
    quiet_access_log()
    allow_many_connections()
    sockets = bind(args)
    # What has been made so far lives as long as we do: the collector need not look at it, not even now.
    gc.freeze()
    gc.enable()
    # Passes over few objects hold up nobody for long, and cycles (a request leaves some) do not pile up.
    gc.set_threshold(2_000, 10, 50)
    sys.setswitchinterval(0.001)  # work in threads gives way to the event loop
    return uvloop.run(serve(config, args, tokenizer, process, sockets))


class _Phases:
    """One log line a phase of the start-up."""

    def __init__(self, started: float) -> None:
        self._last = started

    def done(self, what: str) -> None:
        now = time.perf_counter()
        logger.info("%s took %.2f s", what, now - self._last)
        self._last = now
