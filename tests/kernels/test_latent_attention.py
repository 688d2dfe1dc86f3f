"""Multi-head latent attention: what it makes of latents is attention to the keys and values that they stand for, and
bit-equal in any company."""

from __future__ import annotations

import pytest
import torch
from support.emulated_kernels import all_parameters
from support.latents import EPS, make_layer

from octavo_kernels import AttentionMetadata, cpu, reference
from octavo_kernels.cpu import record

PARTS = [(299, 1), (0, 40), (63, 66), (250, 50)]
SIZES = [(3, 8, 4, 20, 12), (16, 128, 64, 512, 128), (130, 16, 8, 32, 40)]


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("isa", all_parameters(), indirect=True)
@pytest.mark.parametrize("dtype, kv_dtype", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("sizes", SIZES)
def test_absorbed_weights_give_attention_to_keys_and_values(isa, assert_close, sizes, dtype, kv_dtype) -> None:
    layer = make_layer(300, *sizes)
    dtype, kv_dtype = getattr(torch, dtype), getattr(torch, kv_dtype)
    exact = layer.with_keys_and_values(PARTS)
    plain = layer.run(reference, PARTS, 16, kv_dtype, dtype)
    out = layer.run(cpu, PARTS, 16, kv_dtype, dtype)
    assert out.dtype == dtype
    # Where pairs of bfloat16 are multiplied, queries are rounded once more.
    assert_close(out, exact, plain, factor=8.0 if kv_dtype != dtype else 2.0, slack=1e-6)
    if kv_dtype == torch.float32:
        assert (out.double() - exact).abs().max() < 1e-4


@pytest.mark.parametrize("isa", all_parameters(), indirect=True)
def test_a_row_has_the_same_bits_in_any_company(isa, threads) -> None:
    for sizes in SIZES[:2]:
        layer = make_layer(300, *sizes)
        together = layer.run(cpu, PARTS, 16, torch.float32, torch.float32)
        at = 0
        for computed, new in PARTS:
            for number, block_size in ((1, 7), (2, 16)):
                threads(number)
                alone = layer.run(cpu, [(computed, new)], block_size, torch.float32, torch.float32)
                assert torch.equal(together[at : at + new], alone)
            at += new


def test_a_step_is_recorded() -> None:
    layer = make_layer(40, 4, 16, 8, 32, 16)
    cache = torch.zeros(1, 4, 1, 16, 40)
    rows = torch.arange(40)
    metadata = AttentionMetadata(
        torch.tensor([0, 40], dtype=torch.int32),
        torch.tensor([40], dtype=torch.int32),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        rows + 16,
        40,
        40,
        40,
    )

    def step() -> torch.Tensor:
        queries = cpu.latent_queries(
            layer.q, layer.latent, rows, layer.table, cache, metadata.slot_mapping, layer.key_weight, layer.norm, EPS
        )
        return cpu.latent_attention(queries, cache, metadata, layer.scale, layer.value_weight)

    program = record(step)
    program.replay(40)
    assert torch.equal(program.outputs, step())
