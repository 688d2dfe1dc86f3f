"""The Triton kernels' tests: in Triton's interpreter (see tests/conftest.py), or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo_kernels import triton as backend
from octavo_kernels.triton import devices

DEVICE = "cpu" if backend.INTERPRETED else "cuda"
# The interpreter computes products of bfloat16 wrongly (it holds them as integers).
DTYPES = [torch.float32, torch.float16] if backend.INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

if backend.INTERPRETED:
    from support import triton_interpreter

    triton_interpreter.repair()
    triton_interpreter.hasten()


# Compute capability, multiprocessors, KB of shared memory of a program: what is known of L4, H100 and B200.
GPUS = {"L4": (89, 58, 99), "H100": (90, 132, 227), "B200": (100, 148, 227)}


@pytest.fixture(params=GPUS)
def any_gpu(request, monkeypatch) -> Iterator[devices.Facts]:
    """Tensors on "meta" count as those of each of `GPUS`."""
    capability, multiprocessors, memory = GPUS[request.param]
    gpu = devices.Facts(divmod(capability, 10), multiprocessors, memory << 10)
    monkeypatch.setitem(devices.OTHERS, "meta", gpu)
    devices.facts.cache_clear()
    yield gpu
    devices.facts.cache_clear()


@pytest.fixture(autouse=True)
def hostile_gpu(request):
    """Programs in any order, poisoned outputs and scratch memory; not where a test asks for ``untouched_memory``."""
    if not backend.INTERPRETED or request.node.get_closest_marker("untouched_memory"):
        yield
        return
    with triton_interpreter.hostile_gpu(seed=request.node.nodeid.encode()[-1]):
        yield


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
