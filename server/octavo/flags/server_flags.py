"""Flags of the server's arguments: their help, choices and other names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields

from octavo.chat.options import PRESERVE, STRICT_LEVELS
from octavo.chat.thought_tags import REASONING_PARSERS
from octavo.chat.tools.formats.table import TOOL_CALL_PARSERS
from octavo.entrypoints.args import BOTH, ServerArgs
from octavo.flags.fields import add_flags
from octavo.interface.pooling import POOLINGS
from octavo.system.logging_setup import FORMATS, LEVELS
from octavo.text.messages import REASONING

SERVER_HELP = {
    "host": "Address to listen on",
    "port": "Port to listen on; 0: any free one",
    "uds": "Unix socket to listen on instead of host and port",
    "replica_address": "Address of this server for a router in front of several servers, as IP or IP:PORT. Ids of "
    "responses, files and batches then contain the server, so that the router finds it again (default: "
    "OCTAVO_REPLICA_ADDRESS of the environment, else none)",
    "served_model_name": "Names of the model in the API. Answers carry the first (default: the model as given on the "
    "command line)",
    "api_key": "Accepted API keys. Every request must present one of them (default: OCTAVO_API_KEY or VLLM_API_KEY of "
    "the environment, else none)",
    "seal_key": "Secret under which thoughts are encrypted that clients keep and send back: Anthropic's signatures, "
    "OpenAI's encrypted_content. All replicas need the same (default: OCTAVO_SEAL_KEY of the environment, else made of "
    "the model, which every replica knows, and strangers may)",
    "management_host": "Address of the management port (default: --host)",
    "management_port": "Second port for health, /metrics and /load, without a key (default: none)",
    "max_num_queued_reqs": "Maximum number of waiting sequences. Further requests get 429 (default: 8 * "
    "--max-num-seqs)",
    "max_request_bytes": "Maximum size of a request's body, as 4MiB or in bytes "
    "(default: 4 MiB, 32 MiB for a model that reads images, or 32 bytes per token of --max-model-len if that is more)",
    "responses_store": "Where responses and conversations are kept: a SQLite file on a local disk, "
    "a PostgreSQL database that all replicas share (postgresql://USER@HOST/NAME, needs the extra postgres), or memory "
    "(default: OCTAVO_RESPONSES_STORE of the environment, else octavo/responses.db in XDG_STATE_HOME or "
    "~/.local/state, or memory where it cannot be written)",
    "responses_ttl": "Seconds after which a stored response is deleted; 0: never",
    "responses_max_bytes": "Maximum size of all that --responses-store keeps, as 1GiB or in bytes. The oldest makes "
    "room (default: 1 GiB, or 64 MiB in memory)",
    "responses_max_bytes_per_tenant": "Maximum size of what --responses-store keeps for each tenant of a gateway, as "
    "64MiB or in bytes, in a database too. The tenant's oldest makes room (default: no limit of their own)",
    "strict_json_schema": "Treat JSON schemas without additionalProperties as if they said false. "
    "--no-strict-json-schema: allow additional properties, as the standard does",
    "max_logprobs": "Maximum number of log-probabilities per token that a request may ask for",
    "allow_duplicate_request_ids": "Accept a request with the id of a running one, for service meshes that forward "
    "X-Request-Id",
    "shutdown_timeout": "Seconds that running requests have to finish after SIGTERM",
    "health_stall_seconds": "Seconds without a step, while requests are running, after which /health fails",
    "headless": "Run as a worker node (see --node-rank). --port serves health probes only",
    "watchdog_seconds": "Seconds without a step, while requests are running, after which the engine logs its stacks "
    "and exits; 0: never",
    "chat_template": "Chat template: a file, or the template itself (default: the model's own)",
    "trust_request_chat_template": "Allow requests to bring their own chat template",
    "default_chat_template_kwargs": 'Default chat template variables, as {"enable_thinking": false}',
    "exclude_tools_when_tool_choice_none": 'Leave tools out of the prompt when tool_choice is "none"',
    "override_generation_config": 'Default sampling parameters that replace the model\'s own, as {"temperature": 0.2}',
    "enable_force_include_usage": "Report usage in every stream, even if not requested",
    "disable_fastapi_docs": "Disable /docs and /openapi.json",
    "return_tokens_as_token_ids": 'Write tokens in log-probabilities as "token_id:123"',
    "response_role": "Role of the messages in chat answers",
    "tool_call_parser": "Format of the model's tool calls. none: they stay in the content (default: detected from the "
    "chat template)",
    "enable_auto_tool_choice": "Let the model decide whether to call tools",
    "tool_strict_level": "Calls that a grammar holds where the model is free to call. auto: the arguments of tools "
    "that say strict: true, and where there is one the form of all calls; function: that form always; parameter: the "
    "arguments of all tools",
    "reasoning_parser": "Format of the model's reasoning, which is told from the content. none: it stays there "
    "(default: detected from the chat template)",
    "preserve_reasoning": "Keep reasoning of earlier turns in the prompt where the template has a variable for it, so "
    "that the cache keeps what came before a user's message. auto: unless a request drops it (clear_thinking of "
    "/v1/messages); always, never: whatever that says. Variables of the chat template win",
    "stream_head_after": "Seconds after which the head of a stream is sent although no token has come, with comments "
    "until one does, for clients and proxies that give up on silence. Such a request can no longer be refused with a "
    "status, or go to another replica (default: the head comes with the first token)",
    "clamp_max_tokens": "Lower max_tokens and the like to what fits beside the prompt, for agents that send a "
    "constant. /v1/messages and Ollama's routes always do",
    "reasoning_field": "Name of the reasoning in chat completions, for clients that would add two of them up. both: "
    "reasoning and reasoning_content",
    "replay": "Remember answers, so that the next turn's prompt has them as they were spoken and finds them in the "
    "cache",
    "reasoning_budget_message": "Text in front of the closing tag, where a request's budget of thoughts is used up",
    "deferred_tools": "Where the model is told of tools that a client defers (defer_loading). found: where a search "
    "has found them, so that the cache keeps what came before; top: with all others, at the top",
    "decisions_min_mass": "Probability that the labels of a question in /v1/decisions must have together. Below it, "
    "the answer is a refusal",
    "decisions_calibration": "File of temperatures for the answers of /v1/decisions, as octavo decisions calibrate "
    "writes it (default: decisions.json in the model's folder)",
    "embedding_pooling": "Default pooling of /v1/embeddings (default: from the model's files, else mean)",
    "lora_modules": "LoRA adapters to serve, each as name=folder, as name=hf://org/name (or another address), or as "
    'JSON: {"name": "sql", "path": "/adapters/sql"}',
    "lora_dir": "Folder from which /v1/load_lora_adapter may load adapters (default: none; loading is refused)",
    "lora_list": 'JSON file of LoRA adapters to fetch and serve, {"adapters": [{"name": "sql", "uri": '
    '"hf://org/name"}]}. Changes take effect while the server runs (default: none)',
    "lora_credentials": "Folder with credentials for --lora-list, in files named HF_TOKEN, OCTAVO_HTTP_TOKEN, "
    "AWS_ACCESS_KEY_ID and so on (default: none)",
    "allow_runtime_lora_updating": "Allow /v1/load_lora_adapter and /v1/unload_lora_adapter "
    "(VLLM_ALLOW_RUNTIME_LORA_UPDATING sets it too)",
    "allowed_media_domains": "Hosts from which images may be fetched over http and https (default: none)",
    "allowed_local_media_path": "Folder from which images may be read by file: URLs (default: none)",
    "root_path": "Path prefix under which a proxy publishes the server",
    "allowed_origins": "CORS: allowed origins",
    "allowed_methods": "CORS: allowed methods",
    "allowed_headers": "CORS: allowed headers",
    "allow_credentials": "CORS: allow credentials",
    "ssl_keyfile": "Private key of the TLS certificate",
    "ssl_certfile": "TLS certificate. Enables https",
    "ssl_ca_certs": "Certificate authorities that verify client certificates",
    "ssl_cert_reqs": "Client certificates. 0: not requested, 1: optional, 2: required",
    "log_level": "Minimum level of log messages",
    "log_format": "Format of log lines. text: for people; json: for log collectors",
    "disable_access_log": "Do not log each request",
    "enable_log_requests": "Log the parameters of each request, never its text",
    "otlp_traces_endpoint": "OpenTelemetry collector that receives a span for each request (OTLP over HTTP)",
    "disable_log_stats": "Do not log the load every ten seconds",
}
CHOICES = {
    "log_level": LEVELS,
    "log_format": FORMATS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "tool_strict_level": STRICT_LEVELS,
    "preserve_reasoning": PRESERVE,
    "reasoning_field": (BOTH, *REASONING),
    "deferred_tools": ("found", "top"),
    "embedding_pooling": POOLINGS,
}
# What to do with other values of vLLM's.
_TOLD = "leave it out: the chat template tells. Inkling (inkling) is not served"
_ADVICE = {
    "tool_call_parser": _TOLD,
    "reasoning_parser": f"{_TOLD}. For minimax_m2_append_think, which leaves thoughts in the content, take none",
}
_ALIASES = {
    "max_num_queued_reqs": ["--max-queued-requests"],
    "log_level": ["--uvicorn-log-level"],
    "disable_access_log": ["--disable-uvicorn-access-log"],
}


def add_server_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, only: Iterable[str] | None = None
) -> None:
    """A flag for every field of `ServerArgs`, or for those in ``only``."""
    skip = () if only is None else [field.name for field in fields(ServerArgs) if field.name not in only]
    add_flags(parser, ServerArgs, SERVER_HELP, choices=CHOICES, aliases=_ALIASES, advice=_ADVICE, skip=skip)
