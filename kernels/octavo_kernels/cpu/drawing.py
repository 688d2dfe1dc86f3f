"""Drawing tokens in C: everything that a request asks of its tokens, in one call without an operation of torch's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.cpu.library import get_library, threads_for

# csrc/drawing_ops.h: struct draw_request
REQUEST = np.dtype(
    [(name, np.float64) for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")]
    + [("top_k", np.int64), ("stream", np.uint64)]
    + [(name, np.int64) for name in ("num_prompt", "min_position", "slot", "count_slot", "num_logprobs", "allowed")]
    + [(name, np.int64) for name in ("stops", "num_stops", "bias_ids", "bias_values", "num_bias")]
    + [(name, np.int64) for name in ("bad_words", "bad_words_size")]
)


class Drawn(NamedTuple):
    """The tokens of R rows. ``logprobs``, where a row wants them: ids int64 and values float32 ``[R, columns]``, the
    drawn token first, then the best ones in order (the lower id first among equals), and the drawn ones' ranks int64
    [R], counted from 1; undefined beyond what a row wants."""

    token_ids: list[int]
    invalid: list[bool]  # a NaN or +inf among the logits, or every token forbidden: then the token is 0
    logprobs: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]] | None = None


def draw(
    logits: Tensor,
    requests: NDArray[np.void],
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    best: tuple[Tensor, Tensor] | None = None,
    bitmask: Tensor | None = None,
    pool: tuple[Tensor, Tensor, Tensor] | None = None,
    columns: int = 0,
) -> Drawn:
    """Draw a token for each row of ``logits`` float32 ``[R, V]``, which are overwritten.

    Row i is that of ``requests[rows[i]]`` (of dtype `REQUEST`) and of the token at ``positions[i]``, both int64 [R].
    ``best``: what `argmax` says of the logits, if that is known; ``bitmask`` int32 ``[R, ceil(V / 32)]``: what grammars
    allow. ``pool``: history, seen and counts of a token pool, to which the tokens of rows with a slot are added.
    ``columns``: 1 + the most log-probabilities that a row wants, 0: none does. Raises RuntimeError without the C
    kernels.
    """
    library = get_library()
    if library is None:
        raise RuntimeError("the CPU kernels are unavailable")
    count, vocab_size = logits.shape
    found, probabilities = np.empty((3 + columns, count), np.int64), np.empty((count, columns), np.float32)
    at = found.ctypes.data
    wanted = (at + 24 * count, at + 16 * count, probabilities.ctypes.data) if columns else (0, 0, 0)
    op = library.pack(
        "draw",
        logits.data_ptr(),
        requests.ctypes.data,
        rows.ctypes.data,
        positions.ctypes.data,
        *((0, 0) if best is None else (best[0].data_ptr(), best[1].data_ptr())),
        0 if bitmask is None else bitmask.data_ptr(),
        *((0, 0, 0) if pool is None else (part.data_ptr() for part in pool)),
        at,
        at + 8 * count,
        *wanted,
        count,
        vocab_size,
        logits.stride(0),
        0 if pool is None else pool[0].shape[1],
        columns,
    )
    library.run(op, threads_for(count * vocab_size) if count > 1 else 1)
    tokens, invalid = found[:2].tolist()
    logprobs = (found[3:].reshape(count, columns), probabilities, found[2]) if columns else None
    return Drawn(tokens, [bool(one) for one in invalid], logprobs)
