"""Engines with tiny models and two steps in flight, and requests of every kind for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.tiny_models import VOCAB_SIZE

from octavo import LLM
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniProcExecutor
from octavo.interface.engine_config import DEFAULT_ON_CPU, SpeculativeConfig
from octavo.interface.outputs import RequestOutput


def overlapped(llm: LLM) -> LLM:
    """The same engine with two steps in flight."""
    config = llm.engine.config
    if config.speculative == DEFAULT_ON_CPU:  # nobody asked for it
        config = replace(config, speculative=SpeculativeConfig("auto"))
    core = EngineCore(config, UniProcExecutor(config, overlap=True))
    assert core.executor.max_in_flight == 2
    llm.engine = core
    return llm


def tiny(path: Path, **changes: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 256}
    return LLM(str(path), **defaults | changes)


def prompts_of(seed: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    lengths = [rng.choice([1, 5, 16, 33, 60]) for _ in range(count)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [{"prompt_token_ids": shared[: rng.choice([0, 17, 40])] + tokens} for tokens in own]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(o.token_ids, o.cumulative_logprob, o.finish_reason, o.stop_reason) for o in output.outputs]
        for output in outputs
    ]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 0.9, "seed": 1, "max_tokens": 33, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 2, "max_tokens": 7},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3, "max_tokens": 25, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "max_tokens": 30, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 5, "max_tokens": 12, "n": 3},
    {"temperature": 0, "max_tokens": 15, "stop_token_ids": list(range(3, 60))},
    {"temperature": 0.5, "seed": 6, "max_tokens": 16, "min_tokens": 9, "stop_token_ids": list(range(3, 120))},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.8, "seed": 7, "max_tokens": 9, "logit_bias": {5: 4.0, 9: -100.0}, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 8, "max_tokens": 18, "dry_multiplier": 2.0, "dry_allowed_length": 1}
    | {"dry_sequence_breakers": [], "xtc_probability": 0.5, "top_n_sigma": 3.0},
]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "chunks": ("llama", {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "windows": ("gemma2", {"num_gpu_blocks_override": 34, "max_model_len": 208, "long_prefill_token_threshold": 7}),
    "few rows": ("llama", {"max_num_seqs": 3}),
}
