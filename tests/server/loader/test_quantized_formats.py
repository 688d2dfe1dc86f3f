"""One weight at a time, in every format, group size and awkward shape: its values are the format's, and codes of
integers keep them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_files import Writer, awq, bitsandbytes_4bit, compressed, fp8, gptq

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.interface.quantizations import GPU_ONLINE, ONLINE, STORED
from octavo.layers.quantization.packed import keeps_codes, pack_stored
from octavo.layers.quantization.registry import _FORMATS
from octavo.layers.quantization.weight_format import StoredModule
from octavo_kernels.quant import dequantize

QTYPES = {
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass
class InMemory:
    """A `WeightSource`."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def qtype(self) -> str:
        return QTYPES[self.tensor.dtype]

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensor.clone() if dtype is None else self.tensor.to(dtype)


def read(write: Writer, description: dict[str, Any], rows: int, columns: int, change: Any = None) -> tuple[Any, Any]:
    """A random weight as its format reads it, and its values as whoever wrote it says."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * 0.02
    tensors, values = write(weight)
    if change:
        change(tensors)
    sources: Any = {name: InMemory(f"q_proj.{name}", tensor) for name, tensor in tensors.items()}
    fields = Fields({}, "model", str).inner("quantization_config", description)
    found = _FORMATS[description["quant_method"]](fields).weight_format(StoredModule("layers.0.q_proj", sources))
    assert found is not None
    leaves = {leaf.name: leaf for leaf in found.leaves(rows, columns)}
    for name, source in sources.items():
        assert not leaves[name].shapes or source.shape in leaves[name].shapes
        assert not leaves[name].qtypes or source.qtype in leaves[name].qtypes
    assert all(leaf.optional or name in sources for name, leaf in leaves.items())
    return found.read(sources, rows, columns), values


def of_awq(group: int) -> tuple[Writer, dict[str, Any]]:
    return awq(group), {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}


def of_gptq(bits: int, group: int, **options: Any) -> tuple[Writer, dict[str, Any]]:
    return gptq(bits, group, **options), {"quant_method": "gptq", "bits": bits, "group_size": group}


def of_compressed(bits: int, group: int, symmetric: bool = True) -> tuple[Writer, dict[str, Any]]:
    by = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **by)


INTEGERS: dict[str, Callable[[int], tuple[Writer, dict[str, Any]]]] = {
    "awq": of_awq,
    "gptq": partial(of_gptq, 4),
    "gptq asymmetric": partial(of_gptq, 4, symmetric=False),
    "gptq act order": partial(of_gptq, 4, act_order=True),
    "gptq 8 bit": partial(of_gptq, 8),
    "W4A16": partial(of_compressed, 4),
    "W4A16 asymmetric": partial(of_compressed, 4, symmetric=False),
    "W8A16": partial(of_compressed, 8),
}


@pytest.mark.parametrize(("group", "columns"), [(32, 96), (64, 320), (128, 384), (-1, 160), (-1, 1000)])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_in_groups_of_any_size_keep_their_codes(name: str, group: int, columns: int) -> None:
    stored, values = read(*INTEGERS[name](group), 48, columns)
    assert torch.equal(stored.dequantize(), values)
    assert keeps_codes(stored), "no second rounding"
    packed = dequantize(pack_stored(stored, 1))
    expected = values if stored.order is None else values[:, stored.order.long()]
    torch.testing.assert_close(packed, expected, rtol=0, atol=2e-3 * values.abs().max().item())


def test_small_groups_are_rounded_to_8_bits() -> None:
    stored, values = read(*of_awq(16), 48, 96)
    assert torch.equal(stored.dequantize(), values) and not keeps_codes(stored)
    packed = dequantize(pack_stored(stored, 2))
    torch.testing.assert_close(packed, values, rtol=0, atol=values.abs().max().item() / 250)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_do_not_fill_words_are_as_long_as_the_shape_says(bits: int) -> None:
    stored, values = read(*of_compressed(bits, -1), 7, 99)
    assert stored.shape == (7, 99) and torch.equal(stored.dequantize(), values)


def test_zero_points_may_be_stored_unpacked() -> None:
    """Some versions of compressed-tensors do so."""

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        words = tensors["weight_zero_point"]
        codes = (words[:, None, :] >> torch.arange(0, 32, 4)[:, None]) & 15
        tensors["weight_zero_point"] = (codes.flatten(0, 1) - 8).to(torch.int8)

    stored, values = read(*of_compressed(4, 32, symmetric=False), 48, 96, unpack)
    assert torch.equal(stored.dequantize(), values)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64]}


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (96, 160), (8, 200)])
def test_compressed_fp8_in_blocks_is_what_its_library_reads(rows: int, columns: int) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}
    write = fp8("block", (64, 64))
    described = {"targets": ["Linear"], "weights": weights}
    stored, values = read(
        write,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": described}},
        rows,
        columns,
    )
    assert torch.equal(stored.dequantize(), values)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    tensors, _ = write(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * 0.02)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    assert torch.equal(compressor.decompress(tensors, scheme)["weight"].float(), values)


def test_scales_of_blocks_may_be_powers_of_two() -> None:
    """As bytes of exponents: what is multiplied is what the same numbers in float32 give."""
    kept: dict[str, torch.Tensor] = {}

    def round_up(tensors: dict[str, torch.Tensor]) -> None:
        exponents = tensors["weight_scale_inv"].log2().ceil()
        spread = (2.0**exponents).repeat_interleave(64, 0).repeat_interleave(64, 1)
        kept["expected"] = tensors["weight"].float() * spread
        tensors["weight_scale_inv"] = (exponents + 127).to(torch.uint8)

    stored, _ = read(fp8("block", (64, 64), "weight_scale_inv"), BLOCKS, 128, 192, round_up)
    assert torch.equal(stored.dequantize(), kept["expected"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_both_tables_of_bitsandbytes(kind: str, nested: bool) -> None:
    description = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    stored, values = read(bitsandbytes_4bit(nested, 64, kind), description, 48, 320)
    assert torch.equal(stored.dequantize(), values)


def test_zero_points_that_cannot_be_told_are_refused_with_the_way_out() -> None:
    """GPTQModel 5 may have stored either kind; codes that lie anywhere tell nothing. Older tools stored one kind."""
    write, description = of_gptq(8, 32, symmetric=False)

    def scatter(tensors: dict[str, torch.Tensor]) -> None:
        tensors["qweight"].random_(-(1 << 31), (1 << 31) - 1, generator=torch.Generator().manual_seed(1))

    with pytest.raises(ModelError, match=r"q_proj.qzeros'.* cannot be told .*checkpoint_format in config.json"):
        read(write, description | {"meta": {"quantizer": ["gptqmodel:5.0.0"]}}, 16, 32, scatter)
    stored, _ = read(write, description | {"meta": {"quantizer": ["gptqmodel:4.2.5"]}}, 16, 32, scatter)
    said, _ = read(write, description | {"checkpoint_format": "gptq_v2"}, 16, 32, scatter)
    assert torch.equal(stored.zeros, said.zeros + 1)


def test_the_documentation_has_a_row_for_each_name_that_quantization_takes() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "models.md").read_text().splitlines()
    first = lines.index("| format | `--quantization` | what is read | on a CPU | on a GPU | refused |")
    table = lines[first + 2 : first + lines[first:].index("")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table]
    named = {name.strip(" `") for row in rows for name in row[1].split(",")} - {""}
    assert named == {*STORED, *ONLINE, *GPU_ONLINE} - {"none"}
    assert all(len(row) == 6 for row in rows)
