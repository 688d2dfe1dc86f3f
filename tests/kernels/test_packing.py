"""Packed weights hold the file's own codes, and refuse what they cannot hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_weights import SCALES, gguf_rows, make

from octavo_kernels import cpu, packing, quant
from octavo_kernels.cpu.quant import PACKED_TYPES
from octavo_kernels.packing.gguf import FORMATS


@pytest.mark.parametrize("kind", packing.GGUF_TYPES)
@pytest.mark.parametrize("channels", [1, 31, 32, 96])
def test_packing_keeps_the_values_of_the_file(kind, channels):
    """What is packed dequantises to exactly what the gguf package says the file holds, but for the rounding that
    cpu/csrc/quant.h states: offsets within 2^-10 of their channel's unit, scales of super-blocks within 2^-16.
    """
    packed, stored = make(kind, channels, 512)
    weight = quant.unpack_part(packed.parts[0], packed.groups)
    tolerance = torch.tensor(0.0)
    if weight.units is not None:
        assert (weight.units.frexp().mantissa == 0.5).all()
        if kind in SCALES:
            of_scales = 2.0 ** -(16 + weight.kind.shift) * weight.codes.float().abs().amax()
            tolerance = tolerance + 1.01 * of_scales * weight.units[:, None]
        if weight.offsets is not None:
            tolerance = tolerance + 1.01 * 2**-10 * weight.units[:, None]
    elif FORMATS[kind].block_width == 256:  # a scale of 11 bits times one of 4 to 6 as float16
        tolerance = 1.01 * 2**-11 * stored.abs()
    assert ((quant.dequantize(packed) - stored).abs() <= tolerance).all()


def test_eight_bits_are_within_half_a_step():
    torch.manual_seed(0)
    weight = torch.randn(70, 100) * torch.logspace(-6, 4, 70)[:, None]  # also where float16 scales are denormal
    weight[5] = 0
    back = quant.dequantize(packing.pack_w8(weight))
    padded = torch.nn.functional.pad(weight, (0, 28)).unflatten(1, (-1, 32))
    step = (padded.abs().amax(2) / 127)[:, :, None].expand(-1, -1, 32).flatten(1)[:, :100]
    assert ((back - weight).abs() <= 0.51 * step + 5e-6).all()


def test_weights_that_cannot_be_held_are_refused():
    for bad in (float("nan"), float("inf"), 1e9):
        weight = torch.ones(4, 64)
        weight[2, 3] = bad
        with pytest.raises(ValueError, match="weight"):
            packing.pack_w8(weight)
    with pytest.raises(ValueError, match=r"NVFP4.*Q4_0, Q4_1"):
        packing.pack_gguf(torch.zeros(1, 18, dtype=torch.uint8).numpy(), "NVFP4", (1, 32))
    with pytest.raises(ValueError, match="raw"):
        packing.pack_gguf(torch.zeros(1, 17, dtype=torch.uint8).numpy(), "Q4_0", (1, 32))
    with pytest.raises(ValueError, match="width"):
        packing.concat([packing.pack_w8(torch.ones(4, 64)), packing.pack_w8(torch.ones(4, 32))])
    with pytest.raises(ValueError, match="width 64"):
        cpu.quantized_linear(torch.ones(1, 32), packing.pack_w8(torch.ones(4, 64)))


@pytest.mark.parametrize("kind", packing.GGUF_TYPES)
@given(channels=st.integers(1, 100), blocks=st.integers(1, 5), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=25)
def test_c_packs_the_very_bytes_that_plain_torch_does(kind, channels, blocks, seed):
    form = FORMATS[kind]
    torch.manual_seed(seed)
    raw = torch.randint(0, 256, (channels, blocks * form.block_bytes), dtype=torch.uint8)
    width = blocks * form.block_width
    data = torch.full((packing.packed_nbytes(channels, width, kind),), 0xA5, dtype=torch.uint8)
    plain = packing.pack_blocks(raw, kind).parts[0].data
    assert cpu.pack_gguf(raw.numpy(), kind, width, form.kind, data) == (kind in PACKED_TYPES)
    assert kind not in PACKED_TYPES or torch.equal(data, plain)
    assert len(plain) == packing.packed_nbytes(channels, width, kind)
    whole = packing.pack_gguf(raw.numpy(), kind, (channels, width))
    out = torch.full_like(data, 0xA5)
    pieces = packing.pack_gguf((piece.numpy() for piece in raw.split(32)), kind, (channels, width), out=out)
    assert torch.equal(plain, whole.parts[0].data) and pieces.parts[0].data is out and torch.equal(plain, out)


def test_weights_side_by_side_are_joined_without_a_copy():
    """A layer's parts are packed to their places in one tensor; what lies elsewhere, or in between, is copied."""
    one, other = (make("Q4_K", channels, 512)[0] for channels in (64, 48))
    apart = packing.concat([one, other])
    room = apart.parts[0].data.clone()
    sizes = [one.nbytes, other.nbytes]
    first, second = (
        replace(packed, parts=(replace(packed.parts[0], data=data),))
        for packed, data in zip((one, other), room.split(sizes), strict=True)
    )
    joined = packing.concat([first, second]).parts[0]
    assert joined.data.data_ptr() == room.data_ptr() and joined.channels == 112 and torch.equal(joined.data, room)
    swapped = packing.concat([first, one]).parts[0]
    assert torch.equal(swapped.data, torch.cat([room[: one.nbytes], one.parts[0].data]))


def test_rows_that_do_not_add_up_are_refused():
    raw = gguf_rows(torch.randn(64, 64), "Q4_0")
    for pieces, count in (([raw[:31], raw[31:]], 64), ([raw[:32]], 64), ([raw, raw], 64), ([raw[:, :18]], 64)):
        with pytest.raises(ValueError, match="rows"):
            packing.pack_gguf(iter(pieces), "Q4_0", (count, 64))
