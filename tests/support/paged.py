"""Runs a model on whole sequences through a paged cache, in whatever chunks and blocks a test likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.engine.args import EngineArgs
from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_layout import make_layout
from octavo.layers.attention import ForwardContext
from octavo.layers.parallel import TensorParallel
from octavo.loader.load_model import load_model
from octavo.worker.kv_cache import allocate_kv_cache, spec_in_dtype
from octavo.worker.sequence_states import SequenceStates
from octavo_kernels import AttentionMetadata

ROW_MULTIPLE = 8  # what the model runner pads to on a CPU


def model_config(
    model: Path | str | None, dtype: str = "float32", quantization: str | None = "none", **hf_changes: Any
) -> ModelConfig:
    """The model at a path (or the embedded one), with some of config.json's values changed."""
    args = EngineArgs(model=None if model is None else str(model), dtype=dtype, quantization=quantization)
    config = args.create_engine_config(progress=False)
    return replace(config.model, hf_config=config.model.hf_config | hf_changes)


def load(
    model: Path | str | None,
    dtype: str = "float32",
    tp: TensorParallel | None = None,
    quantization: str | None = "none",
) -> nn.Module:
    return load_model(model_config(model, dtype, quantization), tp=tp)


@torch.inference_mode()
def logits_of(
    model: nn.Module,
    sequences: list[list[int]],
    chunk: int = 1 << 30,
    block_size: int = 16,
    seed: int = 0,
    kv_dtype: str = "float32",
    run: Callable[[Callable[[], Tensor]], Tensor] = lambda step: step(),
) -> list[Tensor]:
    """Logits float32 [length, vocab_size] of each sequence; ``run`` runs a step.

    All sequences advance together, ``chunk`` tokens a step (the i-th one ``chunk + i``, so that steps mix lengths),
    through block tables in random order.
    """
    tables, num_blocks = _shuffled_tables([len(s) for s in sequences], block_size, seed)
    cpu = torch.device("cpu")
    specs = [spec_in_dtype(spec, kv_dtype, cpu) for spec in model.kv_cache_specs()]
    state = model.state_spec()
    layout = make_layout(specs, max(map(len, sequences)), block_size, 0, grouped=False, state=state)
    first, count = num_blocks, layout.state_blocks  # states come behind keys and values
    memory = allocate_kv_cache(layout, first + count * len(sequences), cpu, len(sequences))
    caches = memory.layers
    if state is not None:
        memory.blocks.view(torch.float32).fill_(torch.nan)
    states = SequenceStates(len(sequences), count)
    for row in range(len(sequences)):
        states.add(row, list(range(first + row * count, first + (row + 1) * count)), 0)
    for cache in caches:  # of slots that nobody has written everything is NaN, an int8 cache's scales
        cache.fill_(-1 if kv_dtype == "int8" else torch.nan)
    computed = [0] * len(sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    while True:
        step = [
            (i, computed[i], min(len(tokens), computed[i] + chunk + i))
            for i, tokens in enumerate(sequences)
            if computed[i] < len(tokens)
        ]
        if not step:
            return [torch.cat(rows) for rows in parts]
        ids = [token for i, start, end in step for token in sequences[i][start:end]]
        positions = [p for _, start, end in step for p in range(start, end)]
        slots = [int(tables[i, p // block_size]) * block_size + p % block_size for i, s, e in step for p in range(s, e)]
        rows, padding = len(ids), -len(ids) % ROW_MULTIPLE
        lengths = torch.tensor([end - start for _, start, end in step])
        metadata = AttentionMetadata(
            query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
            seq_lens=torch.tensor([end for _, _, end in step], dtype=torch.int32),
            block_table=tables[[i for i, _, _ in step]].contiguous(),
            slot_mapping=torch.tensor(slots + [-1] * padding),
            max_query_len=int(lengths.max()),
            max_seq_len=max(end for _, _, end in step),
            num_actual_tokens=rows,
        )
        which = np.array([i for i, _, _ in step])
        start, until = (np.array([part[at] for part in step]) for at in (1, 2))
        ends = [end == len(sequences[i]) for i, _, end in step]
        states.begin_step(which, [int(end) for end in ends])
        of_states = states.metadata(which, start, metadata.query_start_loc)
        context = ForwardContext([metadata], caches, None, memory.states, of_states if state else None)
        inputs = torch.tensor(ids + [0] * padding), torch.tensor(positions + [0] * padding)

        def compute(inputs: tuple[Tensor, Tensor] = inputs, context: ForwardContext = context) -> Tensor:
            return model.compute_logits(model(*inputs, context))

        logits = run(compute)[:rows]
        states.end_step(which, until)
        for (i, _, end), part in zip(step, logits.split(lengths.tolist()), strict=True):
            parts[i].append(part)
            computed[i] = end


def _shuffled_tables(lengths: list[int], block_size: int, seed: int) -> tuple[Tensor, int]:
    """A block table for each sequence, and how many blocks there are; block 0 stays the null block."""
    needed = [-(-length // block_size) for length in lengths]
    blocks = list(range(1, sum(needed) + 1))
    random.Random(seed).shuffle(blocks)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int32)
    return tables, sum(needed) + 1
