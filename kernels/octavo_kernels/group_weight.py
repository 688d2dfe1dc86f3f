"""Weights with a scale for each group of columns as GPUs read them: codes of 4 or 8 bits, unpacked in registers.

Codes lie in tiles of 64 channels by one block of columns, 4 KB: 64 bytes of each channel. A tile is what a program
loads at a time, each thread 16 bytes of one channel. These are the columns that the thread itself hands to the tensor
cores, in the order of their instruction, so nothing moves between threads (`octavo_kernels.packing.pack_group_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64  # channels
WORDS = 16  # int32 of a channel in a block
# How a code becomes a number, and its bits. The floating-point forms are those of the OCP formats: e2m1 has the values
# 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; e4m3 is torch.float8_e4m3fn.
FORMS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}


@dataclass(frozen=True)
class GroupWeight:
    """A weight ``[channels, width]`` of elements ``scale * (code - zero)``; floating-point codes have no zero.

    ``codes`` int32 [tiles, blocks, 64, 16]; ``scales`` [G, channels] with G = ceil(width / group), floating point or
    uint8: the exponents e of 2^(e - 127); ``zeros`` uint8 [G, channels], None: 2^(bits - 1). With ``order`` int64
    [width] column c of the codes is column ``order[c]`` of the weight.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    form: str
    channels: int
    width: int
    group: int

    @property
    def block(self) -> int:
        """Columns of a block."""
        return block_columns(self.form)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors on the device, by field."""
        fields = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


def block_columns(form: str) -> int:
    """Columns of a block: 64 bytes of codes."""
    return 512 // FORMS[form]


def group_problem(form: str, width: int, group: int) -> str | None:
    """Explain why groups of so many columns have no kernel; None if they have one."""
    block = block_columns(form)
    if group >= width or group % block == 0 or (group >= 16 and block % group == 0):
        return None
    return f"groups of {group} columns have no kernel: use 16, 32, 64, a multiple of {block}, or whole rows"


# A column of a block is word * 32 + sixteen * 16 + eight * 8 + thread * 2 + odd with 4 bits, and with 8 it is
# word * 16 + eight * 8 + thread * 2 + odd: a thread of a quad holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each
# 16. Odd ones of 4 bits lie 16 bits above their neighbours, so that two nibbles become a pair of numbers at once.


def arrange_codes(codes: Tensor, form: str) -> Tensor:
    """Codes uint8 [N, K] as int32 [tiles, blocks, 64, 16]; what is padded is 0."""
    block = block_columns(form)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % block, 0, -len(codes) % TILE))
    tiled = codes.unflatten(0, (-1, TILE)).unflatten(2, (-1, block))  # [tile, row, block, column]
    if FORMS[form] == 4:
        nibbles = tiled.unflatten(3, (4, 2, 2, 4, 2)).permute(0, 2, 1, 6, 3, 7, 4, 5).flatten(5)
        tiled = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    else:
        tiled = tiled.unflatten(3, (4, 2, 4, 2)).permute(0, 2, 1, 5, 3, 4, 6)
    arranged: Tensor = tiled.flatten(3).contiguous().view(torch.int32)
    return arranged


def unpack_codes(weight: GroupWeight) -> Tensor:
    """The codes uint8 [channels, width]: the inverse of `arrange_codes`."""
    tiles, blocks = weight.codes.shape[:2]
    by_byte = weight.codes.view(torch.uint8).view(tiles, blocks, TILE, 4, 4, 4)  # [..., thread, word, byte]
    if FORMS[weight.form] == 4:
        nibbles = torch.stack([by_byte & 15, by_byte >> 4], dim=-1).flatten(-2)
        columns = nibbles.unflatten(-1, (2, 2, 2)).permute(0, 2, 1, 4, 6, 7, 3, 5)
    else:
        columns = by_byte.unflatten(-1, (2, 2)).permute(0, 2, 1, 4, 5, 3, 6)
    codes: Tensor = columns.reshape(tiles * TILE, -1)[: weight.channels, : weight.width]
    return codes
