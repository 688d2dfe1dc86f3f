"""Hashed blocks of a prompt's text, by which pickers know how much of it is where. Pure."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 128
CONTINUES = 0.5  # of a prompt: so much of it was a conversation's last request
# Blocks grow with the text before them: what a hit is worth does, too. Until which byte they have which size.
_LEVELS = ((1 << 14, BLOCK_BYTES), (1 << 17, 4 * BLOCK_BYTES), (1 << 20, 16 * BLOCK_BYTES), (1 << 22, 64 * BLOCK_BYTES))


def _ends() -> list[int]:
    ends = [0]
    for until, size in _LEVELS:
        ends += range(ends[-1] + size, until + 1, size)
    return ends


BLOCK_ENDS = _ends()  # the bytes that so many first blocks have
MAX_BLOCKS = len(BLOCK_ENDS) - 1
MAX_TEXT = BLOCK_ENDS[-1]  # bytes; later text does not count


@dataclass(frozen=True)
class Prompt:
    """A hash for each whole block of the prompt's beginning, of all text before the block's end, and one of all of the
    prompt. They are equal within this process and for one salt only. Empty: there is no prompt, it is no JSON, or it
    takes too long to read. `ends`: a hash for each place, BLOCK_BYTES apart, where the request before this one may have
    ended: in the second half, and where this one ends. `model`: the name in the request. `kept`: how ids in it name the
    replica that keeps what it goes on with; empty: it names none."""

    blocks: Sequence[int] = ()
    ends: Sequence[int] = ()
    text: int = 0
    model: str = ""
    kept: str = ""


def cut(data: bytes, root: int, size: int, model: str = "", kept: str = "") -> Prompt:
    """The prompt whose text begins with `data`, at most MAX_TEXT bytes. `root`: what it shares with nobody that has
    another one; `size`: of the whole text."""
    chain, blocks, ends = root, list[int](), array("q")
    # Rounded down: a request half as long as this one ends there or later, wherever blocks end.
    first = max(BLOCK_BYTES, int(CONTINUES * len(data)) // BLOCK_BYTES * BLOCK_BYTES)
    for begin, end in itertools.pairwise(BLOCK_ENDS):
        if end >= first and begin + BLOCK_BYTES <= len(data):
            place = chain
            for at in range(begin + BLOCK_BYTES, min(end, len(data)) + 1, BLOCK_BYTES):
                place = hash((place, data[at - BLOCK_BYTES : at]))
                if at >= first:
                    ends.append(place)
        if end > len(data):
            break
        chain = hash((chain, data[begin:end]))
        blocks.append(chain)
    return Prompt(blocks, ends, hash((chain, data[BLOCK_ENDS[len(blocks)] :], size)), model, kept)
