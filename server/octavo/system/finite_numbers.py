"""Finding NaN and infinite numbers among weights while they are in the processor's cache, just read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.errors import ModelError

# Of each type: as integers without and with sign, and the bits of infinity. NaN and infinity are the largest of their
# sign in both orders, which the first finds among negative numbers and the second among positive ones.
_BITS: dict[str, tuple[Any, Any, int]] = {
    "F16": (np.uint16, np.int16, 0x7C00),
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F32": (np.uint32, np.int32, 0x7F800000),
    "F64": (np.uint64, np.int64, 0x7FF0000000000000),
}


def finite_check(qtype: str, what: str) -> Callable[[memoryview], None] | None:
    """A function that raises ModelError, naming ``what``, where a number of type ``qtype`` among some bytes is
    NaN or infinite. None for types that have no such numbers, or whose format checks them itself."""
    if qtype not in _BITS:
        return None
    unsigned, signed, infinity = _BITS[qtype]
    negative = infinity + (1 << (8 * np.dtype(unsigned).itemsize - 1))

    def check(piece: memoryview) -> None:
        if np.frombuffer(piece, signed).max() >= infinity or np.frombuffer(piece, unsigned).max() >= negative:
            raise ModelError(f"{what} holds NaN or infinite numbers; the file is damaged: fetch it again")

    return check
