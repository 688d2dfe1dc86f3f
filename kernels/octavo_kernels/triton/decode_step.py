"""The inputs of a decode step from the state of its rows, in one launch.

With torch's operations this takes about twenty launches, and rows of the block table are copied whole, as wide as the
longest possible sequence. Here the sequence's length decides how much is copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.attention_metadata import DecodeStep
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel

CHUNK = 2048  # entries of a block table that a program copies: 16 a thread, 32,768 tokens in blocks of 16
SMALLEST = 128  # one a thread


@triton.jit
def decode_inputs_kernel(
    rows_ptr,
    last_tokens_ptr,
    num_computed_ptr,
    num_kv_tokens_ptr,
    table_ptr,
    token_ids_ptr,
    positions_ptr,
    next_positions_ptr,
    seq_lens_ptr,
    slots_ptr,
    table_out_ptr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows, chunks of the table): the first program of a row also computes the values that are one per row.

    It increments the row's count while the row's other programs may be reading it. Both values are right for them: with
    the new one they copy at most an entry that is not needed yet.
    """
    wait_for_previous_kernel()
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + i)
    real = row >= 0
    length = tl.load(num_computed_ptr + row, mask=real, other=-1) + 1
    # Rounded up to four entries, so that a thread can copy four at once.
    end = (((length + BLOCK_SIZE - 1) // BLOCK_SIZE + 3) // 4 * 4).to(tl.int32)
    if (chunk > 0) & (chunk * CHUNK >= end):
        return
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    wanted = (columns < end) & (columns < WIDTH)
    pages = tl.load(table_ptr + row * WIDTH + columns, mask=wanted)
    if chunk == 0:
        position = tl.maximum(length - 1, 0)
        token = tl.load(last_tokens_ptr + row, mask=real, other=0)
        written = tl.load(num_kv_tokens_ptr + row, mask=real, other=0)
        page = tl.load(table_ptr + row * WIDTH + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        slot = tl.where(real & (position >= written), page * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_ids_ptr + i, token)
        tl.store(positions_ptr + i, position)
        tl.store(next_positions_ptr + i, length)
        tl.store(seq_lens_ptr + i, length.to(tl.int32))
        tl.store(slots_ptr + i, slot)
        tl.debug_barrier()  # every thread reads the count, one of them writes it
        tl.store(num_computed_ptr + row, length, mask=real)
    tl.store(table_out_ptr + i * WIDTH + columns, pages, mask=wanted)


def decode_inputs(
    rows: Tensor,
    last_tokens: Tensor,
    num_computed: Tensor,
    num_kv_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> DecodeStep:
    """See `octavo_kernels.decode_inputs`."""
    count, width = len(rows), block_table.shape[1]
    token_ids, positions, next_positions, slots = (torch.empty_like(rows) for _ in range(4))
    step = DecodeStep(
        token_ids=token_ids,
        positions=positions,
        next_positions=next_positions,
        seq_lens=torch.empty(count, dtype=torch.int32, device=rows.device),
        slot_mapping=slots,
        block_table=torch.empty(count, width, dtype=torch.int32, device=rows.device),
    )
    if not count:
        return step
    chunk = min(max(triton.next_power_of_2(width), SMALLEST), CHUNK)
    decode_inputs_kernel[(count, triton.cdiv(width, chunk))](
        rows,
        last_tokens,
        num_computed,
        num_kv_tokens,
        block_table,
        token_ids,
        positions,
        next_positions,
        step.seq_lens,
        slots,
        step.block_table,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        CHUNK=chunk,
        num_warps=4,
        **pdl_options(rows.device),
    )
    return step
