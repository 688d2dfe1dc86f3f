"""``octavo serve [MODEL]``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time

from octavo.engine.args import EngineArgs
from octavo.engine.core_launcher import CoreOptions, CoreProcess, CoreProcesses, start_cores
from octavo.entrypoints.args import ServerArgs, parse_module
from octavo.entrypoints.listening import bind, check_ports
from octavo.errors import ConfigError, ModelError
from octavo.executor.headless import NodeState, run_headless
from octavo.executor.tls_channel import cluster_token
from octavo.fetch.cache import mark_as_served
from octavo.fetch.model_names import check_model_name
from octavo.flags.config_file import with_config_file
from octavo.flags.serve_flags import add_serve_flags, serve_arguments
from octavo.interface.engine_config import ModelConfig
from octavo.interface.pooling_params import PoolingParams, embedding_pooling
from octavo.system.limits import allow_many_descriptors
from octavo.system.logging_setup import setup_logging

logger = logging.getLogger("octavo.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo serve`."""
    add_serve_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop. Raises OctavoError."""
    started = time.perf_counter()
    namespace = with_config_file(namespace)
    engine_args, args = serve_arguments(namespace)
    for name in (engine_args.model, engine_args.tokenizer):
        check_model_name(name, engine_args.download_dir)
    if args.headless:
        return _run_node(engine_args, args)
    check_ports(args)
    if engine_args.nnodes > 1 and engine_args.distributed_executor_backend != "ray":
        cluster_token()
    setup_logging(args.log_level, args.log_format, process="api")
    allow_many_descriptors()
    # Importing torch takes the core longest of all: it begins at once, and what follows happens meanwhile.
    process = start_cores(engine_args)
    gc.disable()  # what is imported now is no garbage
    try:
        return _serve(engine_args, args, process, started)
    finally:
        gc.enable()
        process.stop()


def _run_node(engine_args: EngineArgs, args: ServerArgs) -> int:
    """A node beside node 0: a rank, and a port for probes."""
    setup_logging(args.log_level, args.log_format, process=f"rank {engine_args.node_rank}")
    cluster_token()  # before a model is fetched
    from octavo.entrypoints.node_health import answer_probes

    state = NodeState()
    answer_probes(state, args, bind(args))
    run_headless(engine_args.create_engine_config(), state)
    return 1  # it ends with node 0 only


def _fetched(module: str, download_dir: str | None) -> str:
    """A value of --lora-modules with the folder of what it names. Raises ConfigError."""
    name, path, base = parse_module(module)
    if "://" not in path:
        return module
    from octavo.fetch.lora import fetch_adapter

    try:
        folder = fetch_adapter(path, download_dir=download_dir)
    except ModelError as error:
        raise ConfigError(f"lora_modules: {name}: {error}") from None
    return json.dumps({"name": name, "path": str(folder), "base_model_name": base})


def _check_pooling(model: ModelConfig, pooling: str | None) -> None:
    """Raise ConfigError where no vector could be made as the model's files and --embedding-pooling say."""
    if "embed" not in model.pooler.tasks:
        return
    try:
        embedding_pooling(model.pooler, PoolingParams(pooling=pooling), model.hidden_size)
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"--embedding-{text}" if text.startswith("pooling ") else text) from None


def _serve(engine_args: EngineArgs, args: ServerArgs, process: CoreProcess | CoreProcesses, started: float) -> int:
    phases = _Phases(started)
    config = engine_args.create_engine_config()
    _check_pooling(config.model, args.embedding_pooling)
    config.model.generation_config.update(args.override_generation_config)
    process.configure(config.to_dict(), CoreOptions(args.watchdog_seconds, args.log_level, args.log_format))
    mark_as_served(config.model.files.weights, engine_args.download_dir)
    args.lora_modules = [_fetched(module, engine_args.download_dir) for module in args.lora_modules]
    fetch_seconds = phases.done("finding the model")
    from octavo.text.tokenizer import Tokenizer

    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
    phases.done("loading the tokenizer")
    import uvloop

    from octavo.entrypoints.server import Started, serve
    from octavo.entrypoints.transport.http_server import quiet_access_log

    phases.done("importing the server")
    quiet_access_log()
    sockets = bind(args)
    # What has been made so far lives as long as we do: the collector need not look at it, not even now.
    gc.freeze()
    gc.enable()
    # Passes over few objects hold up nobody for long, and cycles (a request leaves some) do not pile up.
    gc.set_threshold(2_000, 10, 50)
    sys.setswitchinterval(0.001)  # work in threads gives way to the event loop
    return uvloop.run(serve(config, args, tokenizer, process, sockets, Started(started, fetch_seconds)))


class _Phases:
    """One log line a phase of the start-up."""

    def __init__(self, started: float) -> None:
        self._last = started

    def done(self, what: str) -> float:
        """End a phase; returns its seconds."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        logger.info("%s took %.2f s", what, seconds)
        return seconds
