"""What the kernel tests share: sequences of random keys and values, laid out in poisoned pages."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from support import emulated_kernels

from octavo_kernels import AttentionMetadata
from octavo_kernels.cpu import compiler, library


@pytest.fixture(scope="session")
def all_libraries() -> None:
    """The libraries for all instruction sets of this machine, compiled in parallel, by one process for all."""
    with suppress(compiler.BuildError, OSError):  # then `library.load` says so, or finds another place
        compiler.LIBRARIES.mkdir(exist_ok=True)
        with (compiler.LIBRARIES / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compiler.build_several(compiler.supported_isas())


@pytest.fixture(params=[*emulated_kernels.all_parameters(), "torch"])
def isa(request):
    """Every instruction set this machine runs or emulates, and plain torch as if there were no library."""
    if request.param in compiler.all_isas():
        request.getfixturevalue("all_libraries")
    loads = library.load if request.param in compiler.all_isas() else emulated_kernels.load
    try:
        chosen = None if request.param == "torch" else loads(request.param)
    except compiler.BuildError as error:
        pytest.skip(str(error))
    before = library.get_library()
    library.use_library(chosen)
    yield request.param
    library.use_library(before)


@pytest.fixture
def threads():
    """Set torch's number of threads; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass
class Sequence:
    """The queries [L, Hq, D], keys and values [L, Hkv, D] of a sequence at all of its L positions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, length: int, heads: int, kv_heads: int, head_size: int, seed: int, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        sizes = (heads, kv_heads, kv_heads)
        return cls(*((torch.randn(length, n, head_size, generator=g) * 1.5).to(dtype) for n in sizes))


def lay_out(parts, block_size: int, seed: int = 0, kv_dtype=None, padding: int = 0, shift: int = 0):
    """A step over ``parts``, a list of (sequence, computed, new): returns q, kv_cache, metadata.

    Pages come in random order; every slot that no sequence owns, the rest of a last page included, holds NaN; table
    entries past a sequence's end point to a page full of NaN. ``shift`` unused pages come first.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = [computed + new for _, computed, new in parts]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2 + shift
    pages = (torch.randperm(num_blocks - 2 - shift, generator=g) + 1 + shift).to(torch.int32)
    first = parts[0][0]
    kv_heads, head_size = first.k.shape[1:]
    kv_cache = torch.full(
        (2, num_blocks, kv_heads, block_size, head_size), float("nan"), dtype=kv_dtype or first.k.dtype
    )
    table = torch.full((len(parts), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
    slots = []
    for r, (sequence, computed, _new) in enumerate(parts):
        mine, pages = pages[: counts[r]], pages[counts[r] :]
        table[r, : counts[r]] = mine
        positions = torch.arange(lengths[r])
        blocks, offsets = mine.long()[positions // block_size], positions % block_size
        kv_cache[0, blocks, :, offsets] = sequence.k[: lengths[r]].to(kv_cache.dtype)
        kv_cache[1, blocks, :, offsets] = sequence.v[: lengths[r]].to(kv_cache.dtype)
        slots.append((blocks * block_size + offsets)[computed:])
    q = torch.cat([s.q[computed : computed + new] for s, computed, new in parts])
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=q.dtype)])
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(new for _, _, new in parts)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
        max_query_len=max(new for _, _, new in parts),
        max_seq_len=max(lengths),
        num_actual_tokens=q.shape[0] - padding,
    )
    return q, kv_cache, metadata


def assert_close(out, exact, plain, factor: float = 2.0, slack: float = 1e-7):
    """``out`` is as near to the exact result (float64) as plain torch in the same precision is, up to a factor.

    The rule scales itself: no tolerance to choose for each shape and dtype (FlashAttention-3's tests use it).
    """
    error, allowed = (out.double() - exact).abs().max().item(), (plain.double() - exact).abs().max().item()
    scale = exact.abs().max().item()
    assert torch.isfinite(out).all(), "not finite"
    assert error <= factor * allowed + slack * max(scale, 1.0), f"error {error:.3g}, plain torch {allowed:.3g}"


@pytest.fixture(name="lay_out")
def lay_out_fixture():
    return lay_out


@pytest.fixture(name="sequence_type")
def sequence_fixture():
    return Sequence


@pytest.fixture(name="assert_close")
def assert_close_fixture():
    return assert_close
