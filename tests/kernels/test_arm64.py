"""The kernels for 64-bit ARM: they compile for each instruction set, and run as the reference does.

Where an emulator is installed, too, all tests of kernels that go through the instruction sets run these as well (``-m
slow``, see `support.emulated_kernels`); the few here are the ones to begin with.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from support import emulated_kernels

from octavo_kernels import cpu, packing, reference
from octavo_kernels.cpu import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="every test of kernels runs on this machine"),
]


@pytest.mark.parametrize("isa", emulated_kernels.ISAS)
def test_they_compile(isa: str, tmp_path: Path) -> None:
    if emulated_kernels.cross_compiler() is None:
        pytest.skip(str(emulated_kernels.missing()))
    done = emulated_kernels.compile_for_arm64(isa, tmp_path / "kernels")
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("isa", emulated_kernels.ISAS)
def test_linears_run_as_the_reference_does(isa: str) -> None:
    if problem := emulated_kernels.missing():
        pytest.skip(problem)
    torch.manual_seed(0)
    weight, x = torch.randn(97, 130), torch.randn(5, 130)
    before = library.get_library()
    library.use_library(emulated_kernels.load(isa))
    try:
        dense = [cpu.dense_linear(x, packing.pack_dense(weight.to(d))) for d in (torch.float32, torch.bfloat16)]
        packed = packing.pack_w8(weight)
        rounded = cpu.quantized_linear(x, packed)
    finally:
        library.use_library(before)
    torch.testing.assert_close(dense[0], x @ weight.T, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(dense[1], x @ weight.bfloat16().float().T, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(rounded, reference.quantized_linear(x, packed), rtol=1e-5, atol=5e-5)
