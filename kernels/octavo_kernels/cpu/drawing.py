"""Drawing tokens in C: everything that a request asks of its tokens, in one call without an operation of torch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.cpu.library import get_library, threads_for
from octavo_kernels.quant import BLOCK

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


class Best(NamedTuple):
    """The best of R rows of V logits: the lowest index int64 [R] of a largest one and that one float32 [R], as
    `argmax` has them, and the largest of each `BLOCK` float32 [R, ceil(V / BLOCK)] (undefined in a row with a NaN)."""

    token_ids: Tensor
    values: Tensor
    maxima: Tensor | None = None

    def take(self, rows: Tensor | slice) -> Best:
        """Take some of the rows."""
        return Best(self.token_ids[rows], self.values[rows], None if self.maxima is None else self.maxima[rows])


class Drawing:
    """Draws for up to ``max_rows`` rows: `draw` at once, or what `pack` gives behind the program that fills the logits,
    before `read`. ``requests`` of dtype `REQUEST` are those of all that may come, and must not move."""

    def __init__(self, requests: NDArray[np.void], max_rows: int) -> None:
        """Raises RuntimeError without the C kernels."""
        library = get_library()
        if library is None:
            raise RuntimeError("the CPU kernels are unavailable")
        self._library, self._requests, self._count, self._columns = library, requests, 0, 0
        # Rows, positions, known tokens, tokens, whether invalid, ranks: to ask numpy for an address takes microseconds.
        self._numbers = np.empty((6, max_rows), np.int64)
        at, row = self._numbers.ctypes.data, 8 * max_rows
        self._rows, self._positions, self._known, self._tokens, self._invalid, self._ranks = (
            at + row * number for number in range(6)
        )
        self._table = requests.ctypes.data
        self._kept: tuple[object, ...] = ()
        self._logprobs = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)

    def pack(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        best: Best | None = None,
        bitmask: Tensor | None = None,
        pool: tuple[Tensor, Tensor, Tensor] | None = None,
        columns: int = 0,
        known: NDArray[np.int64] | None = None,
    ) -> bytes:
        """Pack the draw of a token for each of the first R rows of ``logits`` float32 ``[>= R, V]``, which are
        overwritten.

        Row i is that of ``requests[rows[i]]`` and of the token at ``positions[i]``, both int64 [R]. ``best``: of the
        logits, if that is known; ``bitmask`` int32 ``[R, ceil(V / 32)]``: what grammars allow. ``pool``: history, seen
        and counts of a token pool, to which the tokens of rows with a slot are added. ``columns``: 1 + the most
        log-probabilities that a row wants, 0: none does. ``known`` int64 [R]: tokens are guesses, behind so many tokens
        of their sequences; then none is added, and ``columns`` is 0. All must live until the draw has run.
        """
        count, vocab_size = len(rows), logits.shape[1]
        self._count, self._columns = count, columns
        numbers = self._numbers
        numbers[0, :count], numbers[1, :count] = rows, positions
        if known is not None:
            numbers[2, :count] = known
        wanted = (0, 0, 0)
        if columns:
            ids, values = self._logprobs = np.empty((count, columns), np.int64), np.empty((count, columns), np.float32)
            wanted = ids.ctypes.data, self._ranks, values.ctypes.data
        maxima = None if best is None else best.maxima
        self._kept = logits, best, bitmask, pool
        return self._library.pack(
            "draw",
            logits.data_ptr(),
            self._table,
            self._rows,
            self._positions,
            *((0, 0) if best is None else (best.token_ids.data_ptr(), best.values.data_ptr())),
            0 if maxima is None else maxima.data_ptr(),
            0 if known is None else self._known,
            0 if bitmask is None else bitmask.data_ptr(),
            *((0, 0, 0) if pool is None else (part.data_ptr() for part in pool)),
            self._tokens,
            self._invalid,
            *wanted,
            count,
            vocab_size,
            logits.stride(0),
            0 if pool is None else pool[0].shape[1],
            columns,
            BLOCK,
        )

    def read(self) -> Drawn:
        """The tokens, once the operation has run."""
        self._kept = ()
        tokens, invalid, ranks = self._numbers[3:, : self._count]
        logprobs = (*self._logprobs, ranks.copy()) if self._columns else None
        return Drawn(tokens.tolist(), [bool(one) for one in invalid.tolist()], logprobs)

    def draw(self, logits: Tensor, rows: NDArray[np.int64], *args: Any, **kwargs: Any) -> Drawn:
        """`pack`, run and `read`."""
        op = self.pack(logits, rows, *args, **kwargs)
        count = len(rows)
        self._library.run(op, threads_for(count * logits.shape[1]) if count > 1 else 1)
        return self.read()


def draw(logits: Tensor, requests: NDArray[np.void], rows: NDArray[np.int64], *args: Any, **kwargs: Any) -> Drawn:
    """`Drawing.draw` of as many rows. Raises RuntimeError without the C kernels."""
    return Drawing(requests, len(rows)).draw(logits, rows, *args, **kwargs)
