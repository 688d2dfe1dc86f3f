"""Engines with a model of recurrent layers, in memory full of NaN."""

from __future__ import annotations

import random
from typing import Any

import torch
from support.tiny_models import VOCAB_SIZE

from octavo import LLM, SamplingParams

LENGTH = 200  # of sequences, at most
HYBRIDS = ["qwen3.5", "granite4-hybrid", "lfm2", "falcon-h1", "mamba2"]  # of each kind of layers, and without keys


def engine(model: str, **changes: Any) -> LLM:
    options: dict[str, Any] = {"max_model_len": LENGTH, "num_gpu_blocks_override": 800, "max_num_seqs": 8}
    llm = LLM(model, dtype="float32", **{"skip_tokenizer_init": True} | options | changes)
    spoil(llm)
    return llm


def spoil(llm: LLM) -> None:
    """Fill all that no sequence has written with NaN."""
    cache = llm.engine.executor.worker.runner.kv_cache  # type: ignore[attr-defined]
    cache.blocks[1:].view(torch.float32).fill_(torch.nan)
    for layer in cache.states:
        for tensor in (layer.inputs, layer.keys, layer.updates, layer.decays):
            tensor.fill_(torch.nan)


def prompts(*lengths: int) -> list[Any]:
    rng = random.Random(str(lengths))
    return [{"prompt_token_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]} for length in lengths]


def run(llm: LLM, some: list[Any], **params: Any) -> list[list[tuple[Any, Any]]]:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0} | params)
    outputs = llm.generate(some, asked, use_tqdm=False)
    return [[(one.token_ids, one.cumulative_logprob) for one in output.outputs] for output in outputs]
