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
    GROUPS: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows, chunks of the tables): the first program of a row also computes the values that are one per row. A
    table has TABLE_ROWS rows of WIDTH entries.

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
        tl.store(token_ids_ptr + i, token)
        tl.store(positions_ptr + i, position)
        tl.store(next_positions_ptr + i, length)
        tl.store(seq_lens_ptr + i, length.to(tl.int32))
        for group in tl.static_range(GROUPS):
            at = (group * TABLE_ROWS + row) * WIDTH + position // BLOCK_SIZE
            page = tl.load(table_ptr + at, mask=real, other=0).to(tl.int64)
            slot = tl.where(real & (position >= written), page * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slots_ptr + group * tl.num_programs(0) + i, slot)
        tl.debug_barrier()  # every thread reads the count, one of them writes it
        tl.store(num_computed_ptr + row, length, mask=real)
    tl.store(table_out_ptr + i * WIDTH + columns, pages, mask=wanted)
    for group in tl.static_range(1, GROUPS):
        pages = tl.load(table_ptr + (group * TABLE_ROWS + row) * WIDTH + columns, mask=wanted)
        tl.store(table_out_ptr + (group * tl.num_programs(0) + i) * WIDTH + columns, pages, mask=wanted)


def decode_inputs(
    rows: Tensor,
    last_tokens: Tensor,
    num_computed: Tensor,
    num_kv_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> DecodeStep:
    """See `octavo_kernels.decode_inputs`."""
    count, (groups, table_rows, width) = len(rows), block_tables.shape
    token_ids, positions, next_positions = (torch.empty_like(rows) for _ in range(3))
    step = DecodeStep(
        token_ids=token_ids,
        positions=positions,
        next_positions=next_positions,
        seq_lens=torch.empty(count, dtype=torch.int32, device=rows.device),
        slots=torch.empty(groups, count, dtype=torch.int64, device=rows.device),
        block_tables=torch.empty(groups, count, width, dtype=torch.int32, device=rows.device),
    )
    if not count:
        return step
    chunk = min(max(triton.next_power_of_2(width), SMALLEST), CHUNK)
    decode_inputs_kernel[(count, triton.cdiv(width, chunk))](
        rows,
        last_tokens,
        num_computed,
        num_kv_tokens,
        block_tables,
        token_ids,
        positions,
        next_positions,
        step.seq_lens,
        step.slots,
        step.block_tables,
        GROUPS=groups,
        TABLE_ROWS=table_rows,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        CHUNK=chunk,
        num_warps=4,
        **pdl_options(rows.device),
    )
    return step
