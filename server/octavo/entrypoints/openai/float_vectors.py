"""Vectors as bytes of floats: base64, and vLLM's answers in bytes. In plain Python: the API's process does without
numpy."""

from __future__ import annotations

import base64
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

EmbedDtype = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]


def packed(vector: Sequence[float], dtype: EmbedDtype = "float32", order: Endianness = "little") -> bytes:
    """Round the numbers of a vector, which fit float32, to ``dtype`` (to the nearest, ties to even; to infinity beyond
    its range), and write them in the byte ``order``; "native": this machine's."""
    numbers: array[Any] = array("f", vector)
    if dtype == "float16":
        numbers = array("H", b"".join(map(_half, numbers)))
    elif dtype == "bfloat16":
        words = array("I", numbers.tobytes())
        numbers = array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words])
    if order not in ("native", sys.byteorder):
        numbers.byteswap()
    return numbers.tobytes()


def _half(number: float) -> bytes:
    """A float16 in this machine's order of bytes."""
    try:
        return struct.pack("=e", number)
    except OverflowError:
        return struct.pack("=e", float("inf") if number > 0 else float("-inf"))


def as_base64(vector: Sequence[float], dtype: EmbedDtype = "float32", order: Endianness = "little") -> str:
    """`packed` in base64."""
    return base64.b64encode(packed(vector, dtype, order)).decode()
