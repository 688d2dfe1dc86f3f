"""Drawing a token by the Gumbel-max trick with stateless, counter-based noise.

argmax(score + G) with independent standard Gumbel G per token is a draw from softmax(score) (Gumbel 1954; Maddison et
al. 2014). The noise of a token is a hash of (request seed, sample index, absolute position, token id): no generator
state, so a draw repeats bit for bit whatever else is in the batch, after a preemption, and in any order of steps.

The key of a row is one output of splitmix64 (Steele et al. 2014), counted by position; a token's 31 bits come from two
rounds of a 32-bit multiply-xorshift mix (constants: lowbias32, C. Wellons) over the key and a hashed token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample import devices

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0x7FEB352D
_MUL2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_CHUNK = 1 << 20  # logits mixed at a time, so that the passes stay in the cache
_LN2_ULP = math.log(2) / (1 << 23)
_BOUND_OFFSET = math.log(2) * (127 + 31)  # the exponent's bias, and bits / 2**31


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def stream_key(seed: int, sample_index: int) -> int:
    """The 64-bit identity of one sequence's random stream. Any two (seed mod 2**64, index) give unrelated streams."""
    return _mix64(_mix64((seed & _U64) ^ 0x6A09E667F3BCC909) + (sample_index + 1) * _GOLDEN & _U64)


def position_keys(stream_keys: NDArray[np.uint64], positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    """Keys int32 [R, 2] of the draws at these positions."""
    x = stream_keys + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    keys: NDArray[np.int32] = x.view(np.int32).reshape(-1, 2)
    return keys


def _xorshift_(x: Tensor, shift: int, scratch: Tensor) -> None:
    """x ^= x >> shift, the shift being logical."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    x.bitwise_xor_(scratch)


def _mix32_(x: Tensor, added: Tensor | int, scratch: Tensor) -> Tensor:
    """Two multiply-xorshift rounds, in place, with ``added`` in between. int32 arithmetic wraps."""
    x.mul_(_MUL1)
    _xorshift_(x, 15, scratch)
    x.add_(added)
    x.mul_(_MUL2)
    _xorshift_(x, 16, scratch)
    return x


class GumbelNoise:
    """The noise of a vocabulary's tokens. Holds one hashed int32 per token, and room to work in."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        scratch = torch.empty_like(ids)
        _xorshift_(ids, 16, scratch)
        self._salt = _mix32_(ids, 0, scratch)
        self._rows = max(1, _CHUNK // vocab_size)  # drawn at a time on the CPU
        self._work = torch.empty(2, self._rows if device.type == "cpu" else 0, vocab_size, dtype=torch.int32)

    def bits(
        self, keys: Tensor, token_ids: Tensor | None = None, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """int32 in [1, 2**31), shape [N, V], or that of ``token_ids`` [N, C]."""
        salt = self._salt if token_ids is None else self._salt[token_ids]
        x = torch.bitwise_xor(salt, keys[:, :1], out=out)
        x = _mix32_(x, keys[:, 1:], torch.empty_like(x) if scratch is None else scratch)
        return x.bitwise_and_(0x7FFFFFFF).bitwise_or_(1)

    def noise(self, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Standard Gumbel noise, float64, shape as `bits`."""
        return _gumbel(self.bits(keys, token_ids))

    def argmax(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Draw from softmax(scores): float32 [N, V] -> int64 [N]. Scores of -inf are never drawn."""
        if not devices.on_cpu(scores):
            return (scores + self.noise(keys)).argmax(-1)
        step = self._rows
        chunks = [self._argmax_cpu(scores[i : i + step], keys[i : i + step]) for i in range(0, len(scores), step)]
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]

    def _argmax_cpu(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Two logarithms a token would be most of the work, and all but a few tokens are out of the race. With u
        uniform in (0, 1), G = -log(-log(1 - u)) <= -log(u), and a float's bits, read as an integer, bound log2(u) from
        below: that is cheap for every token. The true noise is computed for those whose bound reaches the truth of
        the best bound.
        """
        bits, scratch = self._work[:, : len(scores)]
        self.bits(keys, out=bits, scratch=scratch)
        bound = scratch.view(torch.float32)
        bound.copy_(bits)
        bound.copy_(scratch)  # the float's bits, as a number
        torch.add(scores, bound, alpha=-_LN2_ULP, out=bound).add_(_BOUND_OFFSET)
        first = torch.from_numpy(bound.numpy().argmax(-1))
        best = self._exact(scores, bits, torch.arange(len(scores)), first)
        slack = 1e-3 + 1e-6 * best.abs()  # float32 rounding of the bound, with room to spare
        near = (bound >= (best - slack).float()[:, None]).numpy()
        flat = np.flatnonzero(near)
        rows, ids = np.divmod(flat, scores.shape[1])
        rows_t, ids_t = torch.from_numpy(rows), torch.from_numpy(ids)
        exact = self._exact(scores, bits, rows_t, ids_t).numpy()
        order = np.lexsort((ids, -exact, rows))
        winners, at = np.unique(rows[order], return_index=True)
        first[torch.from_numpy(winners)] = ids_t[torch.from_numpy(order[at])]
        return first

    def _exact(self, scores: Tensor, bits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        return scores[rows, ids].double() + _gumbel(bits[rows, ids])


def _gumbel(bits: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(bits.double() * -(2.0**-31)))
