"""Every Triton kernel, with every row of the launch tables, compiles for each kind of GPU on a machine without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.fetch.cache import cache_dir

SCRIPT = Path(__file__).parents[3] / "benchmarks/kernels_ahead.py"
OF_A_DECODE_STEP = {
    *("embedding_kernel", "rms_norm_kernel", "rope_and_cache_kernel", "silu_and_mul_kernel", "small_linear_kernel"),
    *(
        "plan_decode",
        "decode_attention",
        "reduce_chunks",
        "scan_kernel",
        "draw_kernel",
        "truncated_kernel",
        "full_row_kernel",
    ),
    "decode_inputs_kernel",
    *("latent_cache_kernel", "head_linear_kernel"),
    *("lora_shrink_kernel", "lora_gather_kernel", "lora_expand_kernel"),
    *("route_kernel", "moe_sort_kernel", "moe_gemm_kernel", "moe_sum_kernel", "activate_kernel"),
}
READ_WEIGHTS = {"small_linear_kernel", "group_linear_kernel", "scaled_linear_kernel"}
OLDEST = "3.6.0"  # the one that torch 2.11 brings


def oldest_triton() -> Path:
    """A folder that holds the oldest Triton that is supported, fetched once."""
    folder = cache_dir() / f"triton-{OLDEST}"
    if not (folder / "triton").is_dir():
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        pip = [uv, "pip"] if Path(uv).exists() else [sys.executable, "-m", "pip"]
        python = ["--python", sys.executable] if pip[0] == uv else []
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [*pip, "install", "--quiet", "--no-deps", *python, "--target", str(fresh), f"triton=={OLDEST}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            pytest.skip(f"triton {OLDEST} cannot be fetched: {done.stderr.strip()[-300:]}")
        try:
            fresh.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(fresh)
    return folder


def compile_ahead(tmp_path: Path, *flags: str, paths: tuple[Path, ...] = ()) -> list[dict]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, SCRIPT, *flags, "--json", tmp_path / "kernels.json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads((tmp_path / "kernels.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, every",
    [("pinned", 13), *(pytest.param(version, 1, marks=pytest.mark.long) for version in ("pinned", OLDEST))],
)
def test_every_kernel_compiles_for_hopper(tmp_path, version, every):
    """And fits: no more shared memory than there is, no spilling, prompts on the warp groups' tensor cores."""
    paths = () if version == "pinned" else (oldest_triton(),)
    compiled = compile_ahead(tmp_path, "--every", str(every), paths=paths)
    attention = [c for c in compiled if c["case"].startswith("attention")]
    halves = [c for c in compiled if " f32 " not in c["case"]]
    for dtype in ("bf16", "f16"):
        for kernel in ("prefill_attention", "decode_attention", "reduce_chunks"):
            assert any(c["kernel"] == kernel and dtype in c["case"].split() for c in attention), (dtype, kernel)
    assert [c["case"] for c in compiled if c["shared"] > 227 * 1024] == []
    # What uses its stack is listed by the script. Attention must not; rare paths of sampling may (a row whose cut lies
    # outside the best blocks is scanned whole).
    assert [(c["case"], c["kernel"], c["stack"]) for c in attention if c in halves and c["stack"] > 32] == []
    # What starts while the kernel before it ends must not look at anything before that one's end. Weights may be asked
    # for, which nobody writes then.
    assert {c["kernel"] for c in compiled if c["early"]} >= OF_A_DECODE_STEP
    assert [(c["case"], c["kernel"]) for c in compiled if c["early"] and not c["waits"]] == []
    assert {c["kernel"] for c in compiled if c["prefetches"]} == READ_WEIGHTS
    assert [c["case"] for c in compiled if c["kernel"] in READ_WEIGHTS and not c["prefetches"]] == []
    # Codes come 16 bytes a thread and become numbers in the registers that the tensor cores read.
    codes = [c for c in halves if c["kernel"] in ("group_linear_kernel", "scaled_linear_kernel", "moe_gemm_kernel")]
    assert [c["case"] for c in codes if c["stack"] or not c["wgmma"] or c["mma"] or {*c["copies"]} != {16}] == []
    adapters = [c for c in compiled if c["kernel"].startswith("lora")]
    assert [c["case"] for c in adapters if c["stack"]] == []
    # GPUs wait for each other before they read, and before they write again: each time one signal, two looks.
    meetings = {"one_shot_kernel": 2, "two_shot_kernel": 3, "gather_kernel": 2, "best_kernel": 2}
    exchanges = [c for c in compiled if c["kernel"] in meetings]
    assert {c["kernel"] for c in exchanges} == {*meetings}
    assert all(c["early"] for c in exchanges), "each would drain the device twice in every layer"
    assert [c["case"] for c in exchanges if c["stack"] or c["signals"] != 3 * meetings[c["kernel"]]] == []
    prompts = [c for c in halves if c["kernel"] == "prefill_attention" and "kv fp8 d512" not in c["case"]]
    assert [c["case"] for c in prompts if not c["wgmma"] or c["mma"]] == []


# Each takes most of its kind: what did not fit in 99 KB while the tiles were a Hopper's.
LARGEST = "awq g128 (64|200)$|awq mixtral (160|400)$|bf16 kv bf16 d256 (mixed|71/1 heads)$|bf16 latent 64 heads x 64"
# Bytes a thread: ptxas keeps a few where it takes fewer registers than it may, most for MXFP4's experts on an RTX 5090.
STACK = 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, flags",
    [
        (86, ("--match", LARGEST)),
        *(pytest.param(target, (), marks=pytest.mark.long) for target in (80, 86, 89, 100, 120)),
    ],
)
def test_every_kernel_fits_other_gpus(tmp_path, target, flags):
    """A100, A10, L4, B200 and RTX 5090: into their shared memory and registers, on their tensor cores."""
    compiled = compile_ahead(tmp_path, "--target", str(target), *flags)
    limit = {80: 163, 100: 227}.get(target, 99) << 10
    assert [(c["case"], c["kernel"], c["shared"]) for c in compiled if c["shared"] > limit] == []
    halves = [c for c in compiled if " f32 " not in c["case"]]
    steady = [c for c in halves if c["kernel"].endswith(("attention", "linear_kernel", "gemm_kernel"))]
    assert len({c["kernel"] for c in steady}) >= (4 if flags else 6)
    assert [(c["case"], c["kernel"], c["stack"]) for c in steady if c["stack"] > STACK] == []
    assert [(c["case"], c["kernel"]) for c in steady if not c["mma"] + c["wgmma"] + c["tcgen05"]] == []
