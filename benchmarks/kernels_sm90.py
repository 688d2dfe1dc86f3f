"""What the Triton kernels compile to for Hopper, on a machine without a GPU.

The host code of the kernels runs on tensors without memory ("meta") and every launch becomes a compilation for sm_90,
so what is compiled is what a GPU would be given: same specialisation, same warps and stages. Registers and stack are
read from the machine code with the cuobjdump of Triton's wheel; stack means that registers did not suffice.

    python benchmarks/kernels_sm90.py [--json FILE] [--quick] [--match TEXT]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # bytes a program may have on Hopper
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HALVES = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn


@dataclass
class Compiled:
    """One kernel of one launch."""

    case: str
    kernel: str
    warps: int
    stages: int
    shared: int  # bytes a program
    registers: int  # a thread
    stack: int  # bytes a thread: more than 0 is spilling
    wgmma: int  # instructions in the PTX
    mma: int
    seconds: float

    @property
    def programs_per_sm(self) -> int:
        threads = 32 * self.warps
        by_registers = 65536 // (max(self.registers, 1) * threads)
        return min(by_registers, 2048 // threads, 228 * 1024 // (self.shared + 1024), 32)


class Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import AttentionMetadata
    from octavo_kernels import triton as backend

    def attend(dtype, kv_dtype, head_size, heads, kv_heads, queries, count, **options):
        rows = queries * count
        metadata = AttentionMetadata(
            query_start_loc=empty(count + 1, dtype=torch.int32),
            seq_lens=empty(count, dtype=torch.int32),
            block_table=empty(count, 256, dtype=torch.int32),
            slot_mapping=empty(rows, dtype=torch.int64),
            max_query_len=queries,
            max_seq_len=4096,
            num_actual_tokens=rows,
        )
        cache = empty(2, 1000, kv_heads, 16, head_size, dtype=kv_dtype)
        backend.paged_attention(empty(rows, heads, head_size, dtype=dtype), cache, metadata, head_size**-0.5, **options)

    kinds = {"decode": 1, "verify": 5, "mixed": 2048}
    for dtype in HALVES:
        for kv_dtype in (dtype, FLOAT8):
            name = f"attention {short(dtype)} kv {short(kv_dtype)}"
            for head_size, kind in [*product((64, 128, 256), kinds), (80, "mixed"), (96, "mixed")]:
                case = partial(attend, dtype, kv_dtype, head_size, 32, 8, kinds[kind], 64)
                yield f"{name} d{head_size} {kind}", case
            case = partial(attend, dtype, kv_dtype, 256, 16, 8, 2048, 64, window=4096, softcap=50.0)
            yield f"{name} d256 window softcap", case
            for heads, kv_heads in ((32, 32), (71, 1)):
                case = partial(attend, dtype, kv_dtype, 128, heads, kv_heads, 8, 64)
                yield f"{name} d128 {heads}/{kv_heads} heads", case
    for head_size in (64, 128):
        case = partial(attend, torch.float32, torch.float32, head_size, 32, 8, kinds["mixed"], 64)
        yield f"attention f32 d{head_size} mixed", case


CASES = (attention_cases,)


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", FLOAT8: "fp8"}[dtype]


def compile_all(match: str = "", quick: bool = False) -> list[Compiled]:
    """Compile every launch of the cases whose name holds ``match``; ``quick`` takes the bfloat16 ones alone."""
    driver.set_active(Hopper())
    found: list[Compiled] = []
    seen: set[str] = set()
    case = ""
    run = JITFunction.run

    def compile_instead(self, *args, grid, warmup, **kwargs):
        start = time.perf_counter()
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            found.append(describe(case, compiled, time.perf_counter() - start))
            print(row(found[-1]), flush=True)
        return compiled

    JITFunction.run = compile_instead
    try:
        for cases in CASES:
            for case, launch in cases():
                if match in case and not (quick and ("f16" in case.split()[1:2] or "kv fp8" in case)):
                    launch()
    finally:
        JITFunction.run = run
    return found


def describe(case: str, compiled, seconds: float) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    ptx = compiled.asm["ptx"]
    return Compiled(
        case,
        compiled.metadata.name,
        compiled.metadata.num_warps,
        compiled.metadata.num_stages,
        compiled.metadata.shared,
        registers,
        stack,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"\smma\.sync", ptx)),
        seconds,
    )


def row(c: Compiled) -> str:
    return (
        f"{c.case:42} {c.kernel:20} {c.warps:5} {c.stages:6} {c.shared / 1024:6.0f} KB {c.registers:5} {c.stack:5}"
        f" {c.programs_per_sm:11} {c.wgmma:5} {c.mma:4} {c.seconds:5.1f}"
    )


def report(found: list[Compiled]) -> None:
    print(f"{len(found)} kernels; with stack: {sum(c.stack > 0 for c in found)}")
    for c in found:
        if c.stack:
            print(f"  {c.case}: {c.kernel}, {c.stack} bytes a thread")
        if c.shared > SHARED_LIMIT:
            print(f"  {c.case}: {c.kernel} asks for {c.shared} bytes of shared memory, Hopper has {SHARED_LIMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table there")
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    arguments = parser.parse_args()
    print(f"triton {triton.__version__}, torch {torch.__version__}, sm_90")
    print(f"{'case':42} {'kernel':20} warps stages    shared  regs stack programs/SM wgmma  mma     s")
    found = compile_all(arguments.match, arguments.quick)
    report(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
