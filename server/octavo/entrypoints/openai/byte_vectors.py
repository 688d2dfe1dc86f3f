"""Vectors in bytes: a number each, or a bit. In plain Python: the API's process does without numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


def int8(vector: Sequence[float]) -> list[int]:
    """The numbers of a vector, brought to length 1, times 127, to the nearest integer."""
    scale = 127 / (math.hypot(*vector) or 1)
    return [round(scale * number) for number in vector]


def uint8(vector: Sequence[float]) -> list[int]:
    """`int8` and 127, so that 0 is 127."""
    return [number + 127 for number in int8(vector)]


def ubinary(vector: Sequence[float]) -> list[int]:
    """Eight signs a byte, the first in the highest bit, 1 for numbers above 0; the last byte is filled up with 0."""
    bits = "".join("1" if number > 0 else "0" for number in vector)
    return [int(bits[first : first + 8].ljust(8, "0"), 2) for first in range(0, len(bits), 8)]


def binary(vector: Sequence[float]) -> list[int]:
    """`ubinary` less 128."""
    return [number - 128 for number in ubinary(vector)]


# Cohere's name of the form -> what makes it.
IN_BYTES: Mapping[str, Callable[[Sequence[float]], list[int]]] = {
    "int8": int8,
    "uint8": uint8,
    "binary": binary,
    "ubinary": ubinary,
}
