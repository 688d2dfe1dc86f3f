"""How many bytes weights take in codes, as the kernels hold them: `octavo_kernels.quant` and `.group_weight` without
torch. A test keeps both equal."""

from __future__ import annotations

from dataclasses import dataclass

_GROUP, _STRIP, _BLOCK = 32, 16, 32  # columns with one scale; channels together; channels are padded to so many
_TILE, _BLOCK_BYTES = 64, 64  # of a GPU: channels together, and bytes of each channel in a block of columns
_SCALED_COLUMNS = 128  # with one scale, of 8-bit numbers that are multiplied with 8-bit activations


@dataclass(frozen=True)
class Kind:
    """What codes mean on a CPU, see `octavo_kernels.quant.Kind`."""

    bits: int
    affine: bool = False
    halves: bool = False
    table: bool = False

    def nbytes(self, rows: int, columns: int) -> int:
        """Of one part of a layer's weight."""
        pairs = -(-columns // (2 * _GROUP))
        codes = _STRIP * 2 * _GROUP * self.bits // 8
        pair = codes + _STRIP * 2 * 2 * (1 + self.affine) * (1 + self.halves)
        head = 0 if self.bits == 8 else _STRIP * 4 * (1 + self.table)
        return -(-rows // _BLOCK) * (_BLOCK // _STRIP) * (head + pairs * pair)


INT8 = Kind(8)  # what other weights are rounded to
# Types of GGUF tensors whose own codes are kept, see `octavo_kernels.packing.GGUF_TYPES`.
GGUF_KINDS = {
    "Q4_0": Kind(4), "Q4_1": Kind(4, affine=True), "Q5_0": Kind(5), "Q5_1": Kind(5, affine=True), "Q8_0": INT8,
    "Q2_K": Kind(2, affine=True, halves=True), "Q3_K": Kind(4, halves=True), "Q4_K": Kind(4, affine=True),
    "Q5_K": Kind(5, affine=True), "Q6_K": Kind(6, halves=True), "IQ4_NL": Kind(4, table=True),
    "IQ4_XS": Kind(4, table=True), "MXFP4": Kind(4, table=True), "IQ3_S": Kind(4, table=True),
    "IQ3_XXS": Kind(4, table=True), "IQ2_S": Kind(4, halves=True, table=True),
    "IQ2_XS": Kind(4, halves=True, table=True), "IQ2_XXS": Kind(4, table=True),
    "IQ1_M": Kind(4, halves=True, table=True), "IQ1_S": Kind(2, affine=True), "TQ2_0": Kind(2, affine=True),
    "TQ1_0": Kind(2, affine=True),
}  # fmt: skip


def tiled_nbytes(rows: int, columns: int, bits: int, group: int, scale_bytes: int) -> int | None:
    """On a GPU, as codes that are unpacked in registers; ``scale_bytes`` are those of one group, with its zero point.
    None: such groups have no kernel."""
    block = _BLOCK_BYTES * 8 // bits
    if not (group >= columns or group % block == 0 or (group >= 16 and block % group == 0)):
        return None
    codes = -(-rows // _TILE) * _TILE * -(-columns // block) * _BLOCK_BYTES
    return codes + rows * -(-columns // group) * scale_bytes


def scaled_nbytes(rows: int, columns: int, group: int) -> int | None:
    """On a GPU, as 8-bit numbers that are multiplied with 8-bit activations; None: such groups have no kernel."""
    if group < columns and group != _SCALED_COLUMNS:
        return None
    return rows * (columns + 4 * -(-columns // group))


def fills_tiles(rows: int) -> bool:
    """Whether further channels can follow so many in one weight."""
    return rows % _TILE == 0
