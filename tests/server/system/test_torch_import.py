"""Torch without what only a GPU needs: it is there, it computes, and where that cannot be it is all of torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys

import pytest

from octavo.system.torch_import import _may_have_gpu, empty_library

pytestmark = pytest.mark.skipif(sys.platform != "linux" or _may_have_gpu(), reason="needs Linux without a GPU")
WORK = """
import torch
assert torch.__version__ and not torch.cuda.is_available()
x = torch.arange(12.0).view(3, 4)
assert (x @ x.T).sum() == 1134 and torch.linalg.svdvals(x).numel() == 3
assert torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).isfinite().all()
import sys, ctypes
assert ctypes.CDLL.__name__ == "CDLL" and sys.modules.get("cuda", 1) is not None
names = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
print(" ".join(sorted(names)))
"""


def loaded_by(lines: str, **env: str) -> set[str]:
    command = [
        sys.executable,
        "-c",
        f"from octavo.system import torch_import\n{lines}\ntorch_import.import_torch()\n{WORK}",
    ]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def nvidia(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(("libcublas", "libcudnn", "libnccl", "libnvrtc", "libcusparse"))}


def test_libraries_for_gpus_are_not_loaded_without_one():
    assert not nvidia(loaded_by(""))


@pytest.mark.parametrize(
    ("lines", "env"),
    [
        ("import re; torch_import._UNUSED = re.compile('libcu.*')", {}),  # of which some are in use at once
        ("", {"LD_BIND_NOW": "1"}),  # every symbol is wanted at once
        ("", {"OCTAVO_FULL_TORCH_IMPORT": "1"}),
        ("torch_import._may_have_gpu = lambda: True", {}),
        ("import os; os.memfd_create = lambda name: os.open('/nowhere', 0)", {}),
    ],
)
def test_all_of_torch_is_imported_if_part_of_it_cannot_be(lines, env):
    names = loaded_by(lines, **env)
    if importlib.metadata.version("torch") and any(name.startswith("libtorch_cuda") for name in names):
        assert nvidia(names)


def test_an_empty_library_is_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(empty_library("libnothing.so.7"))
    with pytest.raises(AttributeError):
        ctypes.CDLL(str(path)).anything  # noqa: B018


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"], [f"number_{i}" for i in range(40)]])
def test_a_library_has_the_variables_that_it_is_made_with(names, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(empty_library("libvariables.so", names))
    library = ctypes.CDLL(str(path))
    assert [ctypes.c_long.in_dll(library, name).value for name in names] == [0] * len(names)
    with pytest.raises(ValueError):
        ctypes.c_long.in_dll(library, "none")


def test_torch_finds_variables_of_libraries_that_are_not_there():
    """As torch 2.15 looks for NVSHMEM's: every library finds them."""
    name = "octavo_test_variable"
    look = f"lambda: print(ctypes.c_long.in_dll(ctypes.CDLL(None), {name!r}))"
    lines = f"import atexit, ctypes\ntorch_import._VARIABLES = ({name!r},)\natexit.register({look})"
    assert "c_long(0)" in loaded_by(lines)
