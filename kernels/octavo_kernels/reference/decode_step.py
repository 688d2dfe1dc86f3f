"""The inputs of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import DecodeStep


def decode_inputs(
    rows: Tensor,
    last_tokens: Tensor,
    num_computed: Tensor,
    num_kv_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> DecodeStep:
    """See `octavo_kernels.decode_inputs`."""
    real = rows >= 0
    computed, tables = num_computed[rows], block_tables[:, rows]  # -1: the last row, which is nobody's
    num_computed[rows] = computed + real
    positions = torch.where(real, computed, 0)
    lengths = torch.where(real, positions + 1, 0)
    pages = tables[:, torch.arange(len(rows), device=rows.device), positions // block_size].long()
    slots = pages * block_size + positions % block_size
    return DecodeStep(
        token_ids=torch.where(real, last_tokens[rows], 0),
        positions=positions,
        next_positions=lengths,
        seq_lens=lengths.int(),
        slots=torch.where(real & (positions >= num_kv_tokens[rows]), slots, -1),
        block_tables=tables,
    )
