"""Drawing tokens in C: everything that a request asks of its tokens, in one call without an operation of torch's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.cpu.library import get_library, threads_for

# csrc/ops.h: struct draw_request
REQUEST = np.dtype(
    [(name, np.float64) for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")]
    + [("top_k", np.int64), ("stream", np.uint64)]
    + [(name, np.int64) for name in ("num_prompt", "min_position", "slot", "count_slot", "allowed")]
    + [(name, np.int64) for name in ("stops", "num_stops", "bias_ids", "bias_values", "num_bias")]
    + [(name, np.int64) for name in ("bad_words", "bad_words_size")]
)


def draw(
    logits: Tensor,
    requests: NDArray[np.void],
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    best: tuple[Tensor, Tensor] | None,
    bitmask: Tensor | None,
    history: Tensor,
    seen: Tensor,
    counts: Tensor,
) -> tuple[list[int], list[bool]]:
    """A token for each row of ``logits`` float32 ``[R, V]``, which are overwritten, and whether there is none: a NaN or
    +inf among the logits, or every token forbidden. Then the token is 0.

    Row i is that of ``requests[rows[i]]`` (of dtype `REQUEST`) and of the token at ``positions[i]``, both int64 [R].
    ``best``: what `argmax` says of the logits, if that is known; ``bitmask`` int32 ``[R, ceil(V / 32)]``: what grammars
    allow. ``history``, ``seen`` and ``counts`` are a token pool's, to which the tokens are added. Raises RuntimeError
    without the C kernels.
    """
    library = get_library()
    if library is None:
        raise RuntimeError("the CPU kernels are unavailable")
    count, vocab_size = logits.shape
    out = np.empty((2, count), np.int64)
    tokens = out.ctypes.data
    op = library.pack(
        "draw",
        logits.data_ptr(),
        requests.ctypes.data,
        rows.ctypes.data,
        positions.ctypes.data,
        *((0, 0) if best is None else (best[0].data_ptr(), best[1].data_ptr())),
        0 if bitmask is None else bitmask.data_ptr(),
        history.data_ptr(),
        seen.data_ptr(),
        counts.data_ptr(),
        tokens,
        tokens + 8 * count,
        count,
        vocab_size,
        logits.stride(0),
        history.shape[1],
    )
    library.run(op, threads_for(count * vocab_size) if count > 1 else 1)
    token_ids, invalid = out.tolist()
    return token_ids, [bool(one) for one in invalid]
