"""Sampling: the choice of kernels for a step, and their launches.

Greedy sampling and temperature take one pass over the logits and one or two blocks of each row; top-k, top-p and min-p
one pass and the KEEP best blocks. There is no sort, nothing of the vocabulary's size is written, and no tensor is read
on the host, so a step can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from octavo_kernels.reference import sampling as reference
from octavo_kernels.sampling_rows import Constraints, SampledRows, SamplingRows
from octavo_kernels.triton.dependent_launch import pdl_options
from octavo_kernels.triton.sampling_kernels import draw_kernel, scan_kernel
from octavo_kernels.triton.sampling_truncation import full_row_kernel, logprobs_kernel, truncated_kernel


@dataclass(frozen=True)
class SamplingConfig:
    """Launch shapes: ``tile`` tokens at a time, ``steps`` tiles per program; ``keep`` blocks are read at once, whose
    ``keep * steps`` tokens stay in registers (16 per thread with 16 warps). Warps of the scan and of later kernels."""

    tile: int = 1024
    steps: int = 16
    keep: int = 512
    scan_warps: int = 4
    row_warps: int = 16


CONFIG = SamplingConfig()

# Scores must equal torch's bit for bit: products and sums may not be fused.
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


class _Shape:
    """The division of a vocabulary into chunks and blocks."""

    def __init__(self, vocab: int, config: SamplingConfig) -> None:
        self.tile, self.steps = config.tile, config.steps
        self.chunks = triton.cdiv(vocab, config.tile * config.steps)
        self.blocks = self.chunks * config.tile
        self.padded_blocks = triton.next_power_of_2(self.blocks)
        self.padded_chunks = triton.next_power_of_2(self.chunks)
        # Small vocabularies have fewer blocks.
        self.keep = min(config.keep, self.padded_blocks)


def sample(logits: Tensor, rows: SamplingRows) -> SampledRows:
    """See `octavo_kernels.sample`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab = logits.shape
    device, config, table = logits.device, CONFIG, rows.table
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    invalid = torch.empty(count, dtype=torch.bool, device=device)
    if not count:
        return SampledRows(tokens, invalid)
    shape = _Shape(vocab, config)
    bound = torch.empty(count, shape.blocks, device=device)
    best, peak, mass = bound, bound, bound
    if rows.truncated:
        best = torch.empty_like(bound)
        peak, mass = _of_chunks(count, shape, device)
    constraints = _constraints(rows.constraints)
    constrained = rows.constraints is not None
    source = (constraints, logits, logits.stride(0), vocab)
    cuts = (table.top_k, table.top_p, table.min_p)
    lanes = {"TILE": shape.tile, "STEPS": shape.steps, "CONSTRAINED": constrained, **pdl_options(device)}
    scan_kernel[(shape.chunks, count)](
        *source,
        rows.index,
        rows.index,
        rows.positions,
        table.temperature,
        table.streams,
        bound,
        best,
        peak,
        mass,
        RAW=False,
        TRUNCATED=rows.truncated,
        **lanes,
        num_warps=config.scan_warps,
        **_EXACT,
    )
    lanes |= {"BLOCKS": shape.padded_blocks, "num_warps": config.row_warps}
    whose = (rows.index, rows.positions, table.temperature, *cuts, table.streams)
    flags = invalid.view(torch.int8)
    draw_kernel[(count,)](
        *source,
        *whose,
        bound,
        tokens,
        flags,
        bound,
        shape.chunks,
        TRUNCATED=rows.truncated,
        **lanes,
        **_EXACT,
    )
    if rows.truncated:
        chosen = torch.empty(count, shape.keep, dtype=torch.int32, device=device)
        pending = torch.empty(count, dtype=torch.int32, device=device)
        total = torch.empty(count, device=device)
        truncated_kernel[(count,)](
            *source,
            *whose,
            best,
            peak,
            mass,
            chosen,
            tokens,
            flags,
            pending,
            total,
            shape.chunks,
            CHUNKS=shape.padded_chunks,
            KEEP=shape.keep,
            **lanes,
            **_EXACT,
        )
        full_row_kernel[(count,)](
            *source,
            *whose,
            bound,
            best,
            tokens,
            pending,
            total,
            shape.chunks,
            **lanes,
            **_EXACT,
        )
    return SampledRows(tokens, invalid)


def sample_part(logits: Tensor, rows: SamplingRows, first: int) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.sample_part`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab = logits.shape
    device, table = logits.device, rows.table
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    values = torch.empty(count, dtype=torch.float64, device=device)
    invalid = torch.empty(count, dtype=torch.int8, device=device)
    if not count:
        return tokens, values
    shape = _Shape(vocab, CONFIG)
    bound = torch.empty(count, shape.blocks, device=device)
    source, lanes = ((), logits, logits.stride(0), vocab), {"TILE": shape.tile, "STEPS": shape.steps}
    lanes |= {"TRUNCATED": False, "CONSTRAINED": False, "FIRST": first, **pdl_options(device)}
    scan_kernel[(shape.chunks, count)](
        *source,
        rows.index,
        rows.index,
        rows.positions,
        table.temperature,
        table.streams,
        bound,
        bound,
        bound,
        bound,
        RAW=False,
        **lanes,
        num_warps=CONFIG.scan_warps,
        **_EXACT,
    )
    draw_kernel[(count,)](
        *source,
        rows.index,
        rows.positions,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.streams,
        bound,
        tokens,
        invalid,
        values,
        shape.chunks,
        BLOCKS=shape.padded_blocks,
        PART=True,
        **lanes,
        num_warps=CONFIG.row_warps,
        **_EXACT,
    )
    return tokens, values


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo_kernels.top_logprobs`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    vocab = logits.shape[1]
    shape = _Shape(vocab, CONFIG)
    count = len(rows)
    if k > shape.keep or k > vocab:
        return reference.top_logprobs(logits, rows, token_ids, k)
    device = logits.device
    ids = torch.empty(count, k + 1, dtype=torch.int64, device=device)
    values = torch.empty(count, k + 1, device=device)
    ranks = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return ids, values, ranks
    best = torch.empty(count, shape.blocks, device=device)
    peak, mass = _of_chunks(count, shape, device)
    source = (logits, logits.stride(0), vocab, rows)
    scan_kernel[(shape.chunks, count)](
        (),
        *source,
        rows,
        rows,
        rows,
        rows,
        best,
        best,
        peak,
        mass,
        TILE=shape.tile,
        STEPS=shape.steps,
        RAW=True,
        TRUNCATED=True,
        CONSTRAINED=False,
        num_warps=CONFIG.scan_warps,
        **pdl_options(device),
    )
    logprobs_kernel[(count,)](
        *source,
        token_ids,
        best,
        peak,
        mass,
        torch.empty(count, shape.keep, dtype=torch.int32, device=device),
        ids,
        values,
        ranks,
        shape.chunks,
        k,
        TILE=shape.tile,
        STEPS=shape.steps,
        BLOCKS=shape.padded_blocks,
        CHUNKS=shape.padded_chunks,
        KEEP=shape.keep,
        num_warps=CONFIG.row_warps,
        **pdl_options(device),
    )
    return ids, values, ranks


def _of_chunks(count: int, shape: _Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors instead of the halves of one: for some counts the second half's address would not be a multiple of
    16, and every kernel would be compiled again."""
    return torch.empty(count, shape.chunks, device=device), torch.empty(count, shape.chunks, device=device)


def _constraints(c: Constraints | None) -> tuple[Tensor, ...]:
    """The tensors of constraints, in the order in which `open_row` takes them."""
    if c is None:
        return ()
    return (
        c.bitmask,
        c.bitmask_index,
        c.edit_start,
        c.edit_ids,
        c.edit_values,
        c.seen,
        c.seen_index,
        c.counts,
        c.counts_index,
        c.repetition,
        c.frequency,
        c.presence,
    )
