"""The Triton kernels' tests: in Triton's interpreter (see tests/conftest.py), or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_kernels import triton as backend

DEVICE = "cpu" if backend.INTERPRETED else "cuda"
# The interpreter computes products of bfloat16 wrongly (it holds them as integers).
DTYPES = [torch.float32, torch.float16] if backend.INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

if backend.INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _dot = InterpreterBuilder.create_dot

    def _rounded_once(self, a, b, d, *precision):
        """A GPU adds a tile's products in one order, numpy in one that depends on the tile's height and the processor.
        In float64 the order makes no difference that is left in float32."""
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return _dot(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = _rounded_once


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if not backend.INTERPRETED and "kernels/triton/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)


def pytest_generate_tests(metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE
