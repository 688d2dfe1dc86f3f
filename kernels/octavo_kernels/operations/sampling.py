"""Sampling, and log-probabilities."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.sampling_rows import SampledRows, SamplingRows


def sample(logits: Tensor, rows: SamplingRows) -> SampledRows:
    """Draw one token for each row of ``logits [R, V]`` (any floating-point dtype; not changed).

    The order of operations is constraints, temperature, min-p, top-k, top-p, then the largest score + Gumbel noise. The
    noise is a hash of (stream, position, token), so a draw depends only on its own row and is reproducible bit for bit.
    """
    return backend_for(logits).sample(logits, rows)


def sample_part(logits: Tensor, rows: SamplingRows, first: int) -> tuple[Tensor, Tensor]:
    """`sample` where ``logits [R, V]`` are a part of the vocabulary, from token ``first`` on; without constraints and
    truncation, whatever the rows have.

    Returns token ids int64 [R] of the whole vocabulary, and float64 [R] what each was chosen by: of all parts' tokens
    the one with the largest value, the lowest token among equals, is `sample`'s. A value that is not finite stands for
    an invalid row: infinity, or -infinity where the part has no token that is allowed. Padding rows have 0 and 0.
    """
    return backend_for(logits).sample_part(logits, rows, first)


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``rows`` (int64 [N]) of ``logits [R, V]``: of the sampled token, then the ``k`` largest.

    ``token_ids`` int64 [N] are the sampled ones. Returns ids int64 and values float32 ``[N, k + 1]`` (the lower id
    first among equals), and the sampled tokens' ranks int64 [N], counted from 1.
    """
    return backend_for(logits).top_logprobs(logits, rows, token_ids, k)
