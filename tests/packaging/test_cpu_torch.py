"""The torch of the image server-cpu: it computes, has no word of NVIDIA's on the disk, and is half as large."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
WITH_TORCH = ("torch", "torchgen", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "numpy")
WORK = """
import torch
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
assert torch.allclose(torch.linalg.inv(x) @ x, torch.eye(64), atol=1e-3)
assert torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).isfinite().all()
import torch.distributed, torch.export, torch._dynamo
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    print(error)
"""


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.skipif(not (TORCH / "lib/libtorch_cuda.so").exists(), reason="this torch has no code for GPUs")
@pytest.mark.skipif(not (shutil.which("readelf") and shutil.which("cc")), reason="needs readelf and a C compiler")
def test_torch_works_without_its_code_for_gpus_and_nvidias_libraries(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copytree(TORCH, site / "torch", copy_function=link_or_copy)
    for name in (*WITH_TORCH[1:], "numpy.libs", "typing_extensions.py"):
        if (source := TORCH.parent / name).exists():
            (site / name).symlink_to(source)
    before = size(site / "torch")
    untouched = {path.name: path.stat().st_size for path in (TORCH / "lib").iterdir()}
    done = subprocess.run([sys.executable, ROOT / "release/cpu_torch.py", site], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert size(site / "torch") < 0.55 * before
    assert {path.name: path.stat().st_size for path in (TORCH / "lib").iterdir()} == untouched, "linked files are"
    python = sys._base_executable  # type: ignore[attr-defined]  # not the environment's, which has all of NVIDIA's
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    ran = subprocess.run([python, "-S", "-c", WORK], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "No CUDA GPUs are available" in ran.stdout


@pytest.mark.skipif(not (shutil.which("readelf") and shutil.which("cc")), reason="needs readelf and a C compiler")
def test_libraries_of_the_system_get_nothing_in_their_place(tmp_path: Path) -> None:
    """Else `import zlib` would find an empty libz: torch for arm64 is linked with it."""
    folder = tmp_path / "torch/lib"
    folder.mkdir(parents=True)
    needed = ["libcudart.so.13", "libnccl.so.2", "libnvshmem_host.so.3", "libz.so.1", "libgfortran.so.5"]
    for name in needed:
        subprocess.run(
            ["cc", "-shared", f"-Wl,-soname,{name}", "-x", "c", "/dev/null", "-o", folder / name], check=True
        )
    links = ["-x", "none", "-Wl,--no-as-needed", *(folder / name for name in needed)]
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", folder / "libtorch_cpu.so", *links], check=True)
    for name in needed:
        (folder / name).unlink()
    done = subprocess.run([sys.executable, ROOT / "release/cpu_torch.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"libtorch_cpu.so", *needed[:3]}
