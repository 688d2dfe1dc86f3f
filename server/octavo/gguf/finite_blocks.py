"""Finding NaN and infinite scales among the blocks of a GGUF tensor, while they are in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.errors import ModelError
from octavo.system.finite_numbers import finite_check

# Where a block has numbers in float16, in bytes: its scale, and its minimum or what minima are multiplied with.
_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
_INFINITY = 0x7C00


def block_check(qtype: str, block_bytes: int, what: str) -> Callable[[memoryview], None] | None:
    """Like `finite_check`, of whole blocks of a tensor of type ``qtype``; None for types that have no such numbers."""
    places = _SCALES.get(qtype)
    if places is None and qtype != "IQ1_M":
        return finite_check(qtype, what)

    def check(piece: memoryview) -> None:
        halves = np.frombuffer(piece, np.uint16).reshape(-1, block_bytes // 2)
        for numbers in [halves[:, at // 2] for at in places] if places else [_scales_of_iq1_m(halves)]:
            if (numbers & 0x7FFF).max() >= _INFINITY:
                raise ModelError(f"{what} holds NaN or infinite numbers; the file is damaged: fetch it again")

    return check


def _scales_of_iq1_m(words: np.ndarray) -> np.ndarray:
    """Of uint16 [blocks, 28], each block's scale: 4 bits lie in each of the last four words, on top."""
    four: np.ndarray = words[:, 24:28] >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    scales: np.ndarray = np.bitwise_or.reduce(four, axis=1)
    return scales
