"""Sampling, a whole row at a time: every cut by sorting, every noise in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.sampling_rows import Constraints, SampledRows, SamplingRows

_M32 = 0xFFFFFFFF


def sample(logits: Tensor, rows: SamplingRows) -> SampledRows:
    """See `octavo_kernels.sample`."""
    logits = logits.float()
    if rows.constraints is not None:
        logits = constrained(logits, rows.constraints)
    padding = rows.index < 0
    index, table = rows.index.clamp(min=0), rows.table
    invalid = ~logits.amax(-1).isfinite()
    temperature = table.temperature[index][:, None]
    random = temperature > 0
    scores = logits / torch.where(random, temperature, 1.0)
    if rows.truncated:
        kept = kept_tokens(scores, table.top_k[index], table.top_p[index], table.min_p[index])
        scores = scores.masked_fill(random & ~kept, -torch.inf)
    noise = gumbel(stream_keys(table.streams[index], rows.positions), scores.shape[1])
    tokens = torch.where(random, scores + noise, scores.double()).argmax(-1)
    return SampledRows(tokens.masked_fill(invalid | padding, 0), invalid & ~padding)


def sample_part(logits: Tensor, rows: SamplingRows, first: int) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.sample_part`."""
    logits = logits.float()
    padding = rows.index < 0
    index, table = rows.index.clamp(min=0), rows.table
    temperature = table.temperature[index][:, None]
    random = temperature > 0
    noise = gumbel(stream_keys(table.streams[index], rows.positions), logits.shape[1], first)
    values = torch.where(random, logits / torch.where(random, temperature, 1.0) + noise, logits.double())
    tokens = values.argmax(-1)
    best = values.gather(1, tokens[:, None])[:, 0]
    peak = logits.amax(-1)
    best = torch.where(peak.isnan() | (peak == torch.inf), torch.inf, torch.where(peak == -torch.inf, peak, best))
    tokens = torch.where(best.isfinite(), tokens + first, 0)
    return tokens.masked_fill(padding, 0), best.masked_fill(padding, 0.0)


def constrained(logits: Tensor, c: Constraints) -> Tensor:
    """float32 [R, V] as the rows' constraints leave them."""
    logits = logits.clone()
    for i in range(len(logits)):
        row = logits[i]
        if c.bitmask_index[i] >= 0:
            row[~_bits(c.bitmask[c.bitmask_index[i]], len(row))] = -torch.inf
        edits = slice(int(c.edit_start[i]), int(c.edit_start[i + 1]))
        row.index_add_(0, c.edit_ids[edits].long(), c.edit_values[edits])
        if c.seen_index[i] >= 0:
            seen = _bits(c.seen[c.seen_index[i]], len(row))
            punished = torch.where(row > 0, row / c.repetition[i], row * c.repetition[i])
            if c.counts_index[i] >= 0:
                count = c.counts[c.counts_index[i]]
                punished = punished - c.frequency[i] * count - c.presence[i] * (count > 0)
            row.copy_(torch.where(seen, punished, row))
    return logits


def _bits(words: Tensor, size: int) -> Tensor:
    """bool [size] of int32 words."""
    shifts = torch.arange(32, device=words.device)
    return ((words[:, None].long() >> shifts) & 1).view(-1)[:size].bool()


def kept_tokens(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Select the tokens of ``scores [R, V]`` that stay (bool): min-p, then top-k (equals of the k-th stay), then top-p
    over the rest (the smallest set that reaches the mass; among equals the lower ids), never none."""
    best = scores.amax(-1, keepdim=True)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, top_k[:, None] - 1)
    line = torch.maximum((best.double() + min_p[:, None].log()).float(), kth)
    weight = torch.where(ordered >= line, (ordered.double() - best.double()).exp(), 0.0)
    reached = weight.cumsum(-1)
    before = reached - weight
    inside = (weight > 0) & ((before < top_p[:, None] * reached[:, -1:]) | (top_p[:, None] >= 1))
    inside |= (ordered >= line) & (top_p[:, None] >= 1)  # a weight may be too small for float64
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter_(1, order, inside) & (scores > -torch.inf)


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo_kernels.top_logprobs`."""
    logprobs = logits[rows].float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return torch.cat((token_ids[:, None], ids[:, :k]), 1), torch.cat((chosen, best[:, :k]), 1), ranks


# ---- random bits (octavo.sample.gumbel has the sources), in int64 so that nothing wraps unseen


def stream_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """int64 [R, 2] in [0, 2**32): one output of splitmix64 for each draw."""
    x = streams + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    return torch.stack((x & _M32, _shifted(x, 32)), 1)


def gumbel(keys: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise float64 [R, V] of tokens from ``first`` on, a hash of a row's keys and the token."""
    salt = torch.arange(first, first + vocab_size, device=keys.device)
    salt = _mix(salt ^ (salt >> 16), 0)
    bits = (_mix(salt ^ keys[:, :1], keys[:, 1:]) & 0x7FFFFFFF) | 1
    return -torch.log(-torch.log1p(bits.double() * -(2.0**-31)))


def _mix(x: Tensor, added: Tensor | int) -> Tensor:
    x = (x * 0x7FEB352D) & _M32
    x = x ^ (x >> 15)
    x = (((x + added) & _M32) * 0x846CA68B) & _M32
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return x - (1 << 64)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The logical shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
