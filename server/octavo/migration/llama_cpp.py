"""Flags of llama.cpp's llama-server."""

from __future__ import annotations

import json

from octavo.migration.rules import Rule, among, keep, refuse, sampling

_CACHE_DTYPE = among("--kv-cache-dtype", {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"})
_ONE_DEVICE = "a model runs on one device, or is split with --tensor-parallel-size: leave it out"


def _context(value: str) -> list[str]:
    return [] if value == "0" else ["--max-model-len", value]


def _repository(value: str) -> list[str]:
    return [f"hf.co/{value}"]


def _adapter(value: str) -> list[str]:
    name = value.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return ["--enable-lora", "--lora-modules", f"{name}={value}"]


def _reasoning(value: str) -> list[str]:
    return ["--reasoning-parser", "none"] if value == "none" else []


def _budget(value: str) -> list[str] | None:
    return ["--default-chat-template-kwargs", json.dumps({"enable_thinking": False})] if value == "0" else None


def _device(value: str) -> list[str]:
    return ["--device", "cpu"] if value == "none" else []


def _draft(value: str) -> list[str]:
    config = {"method": "draft_model", "model": value, "num_speculative_tokens": 5}
    return ["--speculative-config", json.dumps(config)]


RULES = [
    Rule("-m --model", ours="MODEL"),
    Rule("-mu --model-url", ours="MODEL"),
    Rule("-hf -hfr --hf-repo", text="MODEL as hf.co/org/name:QUANT", translate=_repository),
    refuse("-hff --hf-file", "name the file in MODEL: org/name/file.gguf"),
    refuse("-hft --hf-token", "set HF_TOKEN in the environment"),
    Rule("-c --ctx-size", text="--max-model-len; 0: leave it out", translate=_context),
    Rule("-np --parallel", ours="--max-num-seqs"),
    Rule("-b --batch-size -ub --ubatch-size", text="--max-num-batched-tokens bounds a step"),
    Rule("-t --threads -tb --threads-batch", text="threads follow the CPUs that are allowed, or OMP_NUM_THREADS"),
    Rule("--numa", text="memory is placed where it is used"),
    Rule("-ngl --gpu-layers --n-gpu-layers", text="a model runs on one device as a whole"),
    refuse("-sm --split-mode -ts --tensor-split -mg --main-gpu", "give --tensor-parallel-size"),
    refuse("-ot --override-tensor", _ONE_DEVICE),
    refuse("-ncmoe --n-cpu-moe", _ONE_DEVICE),
    refuse("-cmoe --cpu-moe", _ONE_DEVICE, 0),
    Rule("-dev --device", text="--device cpu for none; else the machine tells", translate=_device),
    Rule("-fa --flash-attn", "?", text="attention is always computed in tiles"),
    Rule("--mlock --no-mmap --mmap --no-warmup --warmup", 0, text="weights are read once, into memory"),
    Rule("-cb --cont-batching", 0, text="batching is always continuous"),
    refuse("-nocb --no-cont-batching", "batching is always continuous: leave it out", 0),
    Rule(
        "-ctk --cache-type-k -ctv --cache-type-v",
        text="--kv-cache-dtype: int8 for q8_0",
        translate=_CACHE_DTYPE,
    ),
    Rule("--cache-reuse", text="prefixes are always cached"),
    Rule("--swa-full", 0, "--disable-hybrid-kv-cache-manager"),
    refuse("--mmproj -mm --mmproj-url -mmu", "GGUF files are read without pictures: serve the model's safetensors"),
    Rule("--lora", text="--enable-lora --lora-modules NAME=FILE", translate=_adapter),
    Rule("-md --model-draft --spec-draft-model", text="--speculative-config", translate=_draft),
    refuse("--draft --draft-max --draft-n --draft-min --draft-n-min", "num_speculative_tokens of --speculative-config"),
    keep("--host"),
    keep("--port"),
    keep("--api-key"),
    refuse("--api-key-file", "set OCTAVO_API_KEY in the environment"),
    Rule("--api-prefix", ours="--root-path"),
    Rule("--ssl-key-file", ours="--ssl-keyfile"),
    Rule("--ssl-cert-file", ours="--ssl-certfile"),
    Rule("-to --timeout", text="no time limit applies to requests"),
    Rule("-a --alias", ours="--served-model-name"),
    Rule("--jinja", 0, text="chat templates are always Jinja"),
    refuse("--no-jinja", "chat templates are always Jinja: leave it out", 0),
    Rule("--chat-template-file", ours="--chat-template"),
    refuse("--chat-template", "leave it out: the model's own is used; --chat-template takes a file or a template"),
    Rule("--chat-template-kwargs", ours="--default-chat-template-kwargs"),
    Rule("--reasoning-format", text="--reasoning-parser none for none; else leave it out", translate=_reasoning),
    Rule("--reasoning-budget", text="--default-chat-template-kwargs for 0; else leave it out", translate=_budget),
    Rule("--embedding --embeddings", 0, text="/v1/embeddings is always there"),
    Rule("--reranking --rerank", 0, text="/rerank is always there"),
    Rule("--pooling", ours="--embedding-pooling"),
    Rule("--metrics --props --slots", 0, text="/metrics is always there"),
    Rule("--no-slots", 0, text="there is no /slots"),
    Rule("--no-webui", 0, text="the page at / stays"),
    Rule("-v --verbose", 0, text="--log-level debug", translate=lambda _: ["--log-level", "debug"]),
    refuse("-n --predict --n-predict", "requests give max_tokens"),
    refuse("-s --seed", "requests give seed"),
    sampling("--temp --temperature", "temperature"),
    sampling("--top-k", "top_k"),
    sampling("--top-p", "top_p"),
    sampling("--min-p", "min_p"),
    sampling("--repeat-penalty", "repetition_penalty"),
    refuse("--presence-penalty --frequency-penalty", "requests give it"),
    refuse("--rope-scaling --rope-scale --yarn-orig-ctx", 'give --rope-scaling \'{"rope_type": "yarn", ...}\''),
    Rule("--rope-freq-base", ours="--rope-theta"),
    refuse("--grammar --grammar-file -j --json-schema", "requests give structured_outputs"),
    refuse("--models-dir --models-preset --models-max", "a server has one model: an LLMGateway has several"),
]
