"""Packing of weights into the layouts that the kernels read: one module for each file format."""

from octavo_kernels.packing.dense import fill_dense, pack_dense
from octavo_kernels.packing.gguf import GGUF_TYPES, block_width, pack_blocks, pack_gguf, packed_kind, packed_nbytes
from octavo_kernels.packing.group_weight import pack_group_weight
from octavo_kernels.packing.groups import KINDS, concat, pack_codes, pack_w8, pack_w8_pieces
from octavo_kernels.packing.row_scaled import fits_row_scales, pack_row_scaled
