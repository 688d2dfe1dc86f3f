"""Every type that the reference package decodes comes out the same here, whatever the bytes."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.gguf.dequantize import _OWN, dequantize
from octavo.gguf.header import _SCALES, TENSOR_TYPES, block_check

DECODABLE = sorted(kind.name for kind in quants._type_traits)


def test_the_table_of_types_is_the_formats() -> None:
    assert {k: (block, size) for k, (_, block, size) in TENSOR_TYPES.items()} == {
        int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()
    }
    assert {k: name for k, (name, _, _) in TENSOR_TYPES.items()} == {int(k): k.name for k in GGML_QUANT_SIZES}


def test_common_types_are_our_own() -> None:
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"} <= _OWN.keys()


@pytest.mark.parametrize("qtype", DECODABLE)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3))
def test_bit_equal_to_the_reference(qtype: str, seed: int, rows: int, blocks: int) -> None:
    kind = GGMLQuantizationType[qtype]
    _, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, kind).astype(np.float32)
    got = dequantize(raw, qtype, torch.float32).numpy()
    assert got.shape == expected.shape
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    assert same.all()


@pytest.mark.parametrize("qtype", sorted({"F16", "BF16", "F32", "IQ1_M", *_SCALES} & set(DECODABLE)))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 20))
def test_checked_blocks_are_finite_and_finite_blocks_pass_the_check(qtype: str, seed: int, blocks: int) -> None:
    size = GGML_QUANT_SIZES[GGMLQuantizationType[qtype]][1]
    raw = np.random.default_rng(seed).integers(0, 256, (1, blocks * size), dtype=np.uint8)
    finite = bool(dequantize(raw, qtype, torch.float32).isfinite().all())
    check = block_check(qtype, size, "tensor 'x'")
    assert check is not None
    with nullcontext() if finite else pytest.raises(ModelError, match="tensor 'x' holds NaN"):
        check(memoryview(raw.ravel()))


@pytest.mark.parametrize("qtype", ["Q4_1", "Q6_K", "IQ2_XS"])
def test_a_tensor_larger_than_a_chunk_is_the_same_all_along(qtype: str) -> None:
    kind = GGMLQuantizationType[qtype]
    block, size = GGML_QUANT_SIZES[kind]
    per_row = 1024 // block
    raw = np.random.default_rng(0).integers(0, 128, (2100, per_row * size), dtype=np.uint8)  # no huge exponents
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, kind)
    np.testing.assert_array_equal(dequantize(raw, qtype).numpy(), expected)


@pytest.mark.parametrize(("qtype", "dtype"), [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_types_are_read_as_they_are(qtype: str, dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(dtype)
    raw = values.view(np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(dequantize(raw, qtype).numpy(), values)
    assert dequantize(raw, qtype, torch.bfloat16).dtype == torch.bfloat16


def test_a_type_that_nobody_decodes_is_an_error_of_one_line() -> None:
    with pytest.raises(ModelError, match="Q8_1 cannot be dequantised"):
        dequantize(np.zeros((1, 40), np.uint8), "Q8_1")
