"""Flags of Hugging Face's text-generation-launcher (TGI)."""

from __future__ import annotations

import json

from octavo.migration.rules import Rule, keep, refuse

_QUANTIZATIONS = {"awq": "awq", "gptq": "gptq", "marlin": "gptq_marlin", "fp8": "fp8", "compressed-tensors": ""}
_QUANTIZATIONS |= {"eetq": "int8", "bitsandbytes": "int8"}  # whose own formats are made at the start, too


def _quantize(value: str) -> list[str] | None:
    ours = _QUANTIZATIONS.get(value)
    return None if ours is None else ["--quantization", ours] if ours else []


def _speculate(value: str) -> list[str] | None:
    if not value.isdigit() or value == "0":
        return []
    config = {"method": "ngram", "num_speculative_tokens": int(value), "prompt_lookup_max": 4}
    return ["--speculative-config", json.dumps(config)]


def _adapters(value: str) -> list[str]:
    modules = []
    for adapter in value.split(","):
        name, _, path = adapter.rpartition("=")
        modules.append(f"{name or path.replace('/', '-')}={path if path.startswith('/') else f'hf://{path}'}")
    return ["--enable-lora", "--lora-modules", *modules]


RULES = [
    Rule("--model-id", ours="MODEL"),
    keep("--revision"),
    keep("--dtype"),
    Rule("--quantize", text="--quantization; else leave it out: the checkpoint tells", translate=_quantize),
    Rule("--num-shard", ours="--tensor-parallel-size"),
    Rule("--sharded", "?", text="--tensor-parallel-size above 1 tells"),
    Rule("--max-total-tokens", ours="--max-model-len"),
    Rule("--max-input-tokens --max-input-length", text="--max-model-len bounds prompt and answer together"),
    Rule("--max-batch-prefill-tokens", ours="--max-num-batched-tokens"),
    Rule("--max-batch-total-tokens", text="the KV cache takes what memory leaves, or --kv-cache-memory-bytes"),
    Rule("--max-batch-size", ours="--max-num-seqs"),
    Rule("--max-concurrent-requests", ours="--max-num-queued-reqs"),
    Rule("--waiting-served-ratio --max-waiting-tokens", text="prompts are cut into chunks between answers' tokens"),
    Rule("--hostname", ours="--host"),
    Rule("-p --port", ours="--port"),
    keep("--api-key"),
    Rule("--prometheus-port", ours="--management-port"),
    Rule("--huggingface-hub-cache --weights-cache-override", ours="--download-dir"),
    Rule("--cuda-memory-fraction", ours="--gpu-memory-utilization"),
    refuse("--rope-scaling --rope-factor", 'give --rope-scaling \'{"rope_type": "yarn", "factor": 4.0, ...}\''),
    Rule("--json-output", 0, text="--log-format json", translate=lambda _: ["--log-format", "json"]),
    Rule("--otlp-endpoint", ours="--otlp-traces-endpoint"),
    refuse("--otlp-service-name", "set OTEL_SERVICE_NAME in the environment"),
    Rule("--cors-allow-origin", ours="--allowed-origins"),
    Rule("--trust-remote-code", "?", text="code from model repositories never runs"),
    Rule("--validation-workers", text="prompts are read in the API's process"),
    Rule("--max-best-of --max-stop-sequences --max-client-batch-size", text="requests are bounded otherwise"),
    Rule("--max-top-n-tokens", ours="--max-logprobs"),
    refuse("--disable-grammar-support", "requests that need no grammar pay nothing for it: leave it out", "?"),
    Rule("--lora-adapters", text="--enable-lora --lora-modules NAME=ADDRESS", translate=_adapters),
    Rule("--speculate", text="--speculative-config with method ngram", translate=_speculate),
    refuse("--tokenizer-config-path", "give --tokenizer a folder, or --chat-template"),
    Rule("--payload-limit", ours="--max-request-bytes"),
    Rule("--usage-stats", text="nothing is sent anywhere"),
    Rule("--master-addr --master-port --shard-uds-path", text="ranks of one machine find each other"),
    Rule("--cuda-graphs", text="the engine chooses the sizes of captured steps"),
    Rule("--enable-prefill-logprobs", "?", text="requests ask for prompt_logprobs"),
    Rule("--graceful-termination-timeout", ours="--shutdown-timeout"),
    Rule("--disable-custom-kernels", "?", text="results do not depend on it"),
    Rule("--kv-cache-dtype", text="--kv-cache-dtype fp8", translate=lambda _: ["--kv-cache-dtype", "fp8"]),
]
