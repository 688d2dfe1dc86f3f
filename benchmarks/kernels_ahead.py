"""What the Triton kernels compile to for each kind of GPU, on a machine without one.

The host code of the kernels runs on tensors without memory ("meta") and every launch becomes a compilation for the
target, so what is compiled is what a GPU would be given: same specialisation, same tiles, warps and stages. Registers
and stack are read from the machine code with the cuobjdump of Triton's wheel; stack means that registers did not
suffice.

    python -m benchmarks kernels_ahead [--target 80,90] [--json FILE] [--match TEXT] [--every N] [--jobs N]
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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels_ahead_cases import CASES

# Capability -> multiprocessors of its best-known GPU, KB of shared memory that a program can have: A100, A10, L4, H100,
# B200, RTX 5090.
TARGETS = {80: (108, 163), 86: (72, 99), 89: (58, 99), 90: (132, 227), 100: (148, 227), 120: (170, 99)}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass
class Compiled:
    """One kernel of one launch."""

    target: int
    case: str
    kernel: str
    warps: int
    stages: int
    shared: int  # bytes a program
    registers: int  # a thread
    stack: int  # bytes a thread: more than 0 is spilling
    wgmma: int  # instructions in the PTX
    mma: int
    tcgen05: int
    signals: int  # atomic operations by which GPUs wait for each other, each in order with what is before or behind it
    early: bool  # programs start while the kernel before it ends
    waits: bool  # and wait for it before they touch what others may write
    prefetches: int  # that a lane asks for before it waits: of constants alone, see dependent_launch
    copies: list[int]  # bytes of each asynchronous copy to shared memory
    seconds: float

    @property
    def programs_per_sm(self) -> int:
        threads = 32 * self.warps
        by_registers = 65536 // (max(self.registers, 1) * threads)
        most, memory = 1536 if self.target in (86, 89, 120) else 2048, (TARGETS[self.target][1] + 1) * 1024
        return min(by_registers, most // threads, memory // (self.shared + 1024), 32)


@dataclass
class Driver:
    """As much of a driver as a compilation asks for."""

    target: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# Of these kernels only the variants that differ in these constants are compiled: the others differ in numbers alone.
VARIANTS = {"reduce_chunks": ("HEAD_PAD", "GROUP_PAD", "BLOCK_D", "FIXED_CHUNK", "BLOCK_C")}


def kind_of(case: str) -> str:
    """Its name without numbers and types."""
    return " ".join(word for word in case.split() if not re.search(r"\d", word))


def compile_all(target: int, match: str = "", every: int = 1, part: int = 0, parts: int = 1) -> list[Compiled]:
    """Compile every launch of each kind's ``every``-th case whose name holds ``match``: one of equal ``parts``."""
    from octavo_kernels.triton import devices

    driver.set_active(Driver(target))
    devices.OTHERS["meta"] = devices.Facts(divmod(target, 10), TARGETS[target][0], TARGETS[target][1] << 10)
    devices.facts.cache_clear()
    found: list[Compiled] = []
    seen: set = set()
    case = ""
    run = JITFunction.run

    def compile_instead(self, *args, grid, warmup, **kwargs):
        start = time.perf_counter()
        if self.__name__ in VARIANTS:
            variant = (self.__name__, args[0].dtype, *(kwargs[name] for name in VARIANTS[self.__name__]))
            if variant in seen:
                return
            seen.add(variant)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            found.append(describe(target, case, compiled, time.perf_counter() - start))
            print(row(found[-1]), flush=True)

    JITFunction.run = compile_instead
    try:
        kinds: dict[str, list[tuple[str, Callable[[], object]]]] = {}
        for name, launch in (
            case for cases in CASES for case in cases() if re.search(match, case[0]) and not lacks(target, case[0])
        ):
            kinds.setdefault(kind_of(name), []).append((name, launch))
        wanted = [case for cases in kinds.values() for case in cases[::every]]
        for name, launch in wanted[len(wanted) * part // parts : len(wanted) * (part + 1) // parts]:
            case = name
            launch()
    finally:
        JITFunction.run = run
    return found


def lacks(target: int, case: str) -> bool:
    """True if a target's tensor cores do not take the numbers of a case: weights in FP8 alone become others before."""
    return target < 89 and bool(re.search("kv fp8|scaled_linear fp8|quantize fp8|w8a8 fp8", case))


def describe(target: int, case: str, compiled, seconds: float) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    ptx = compiled.asm["ptx"]
    return Compiled(
        target,
        case,
        compiled.metadata.name,
        compiled.metadata.num_warps,
        compiled.metadata.num_stages,
        compiled.metadata.shared,
        registers,
        stack,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"\smma\.sync", ptx)),
        ptx.count("tcgen05.mma"),
        len(re.findall(r"atom\S*\.(?:acquire|release)\.sys|atom\S*\.sys\.(?:acquire|release)", ptx)),
        compiled.metadata.launch_pdl,
        waits_first(ptx),
        before_waiting(ptx).count("prefetch.global.L2 "),
        [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)],
        seconds,
    )


def before_waiting(ptx: str) -> str:
    """What a kernel does until it waits for the one before it: everything, if it never does."""
    return ptx[ptx.index(".entry") :].partition("griddepcontrol.wait")[0]


def waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the one before it in its first block, before it touches memory that others see.

    To ask for lines in the L2 cache is no touch, in the L1 cache, which may hold old values, it is.
    """
    touch = r"\b(ld|st|atom|red|cp\.async|prefetch(?!\.global\.L2 )|prefetchu|ldu)\b(?!\.(param|shared))"
    return not re.search(rf"{touch}|\sbra|\sret;", before_waiting(ptx))


def row(c: Compiled) -> str:
    return (
        f"{c.target:6} {c.case:42} {c.kernel:20} {c.warps:5} {c.stages:6} {c.shared / 1024:6.0f} KB {c.registers:5}"
        f" {c.stack:5} {c.programs_per_sm:11} {c.wgmma:5} {c.mma:4} {c.tcgen05:4} {c.seconds:5.1f}"
    )


def report(found: list[Compiled]) -> None:
    print(f"{len(found)} kernels; with stack: {sum(c.stack > 0 for c in found)}")
    for c in found:
        if c.stack:
            print(f"  sm_{c.target} {c.case}: {c.kernel}, {c.stack} bytes a thread")
        if c.shared > TARGETS[c.target][1] << 10:
            print(f"  sm_{c.target} {c.case}: {c.kernel} asks for {c.shared >> 10} KB of {TARGETS[c.target][1]} KB")


def compile_in_parallel(targets: list[int], match: str, every: int, jobs: int) -> list[Compiled]:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        command = [sys.executable, __file__, "--match", match, "--every", str(every)]
        for target in targets:  # one after the other: Triton asks once in a process what it compiles for
            running = []
            for part in range(jobs):
                files.append(Path(folder, f"{target} {part}.json"))
                of_part = ["--target", str(target), "--part", f"{part}/{jobs}", "--json", files[-1]]
                running.append(subprocess.Popen([*command, *of_part]))
            codes = [process.wait() for process in running]
            if any(codes):
                raise SystemExit("a compilation failed, see above")
        return [Compiled(**c) for file in files for c in json.loads(file.read_text())]


def _joined(targets: Iterable[int]) -> str:
    return ",".join(map(str, targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table there")
    parser.add_argument("--target", default="90", help=f"compute capabilities, of {_joined(TARGETS)}")
    parser.add_argument("--match", default="", help="only cases in whose name this regular expression is found")
    parser.add_argument("--every", type=int, default=1, help="only each kind's first case and every N-th after it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile with so many processes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = [int(target) for target in arguments.target.split(",")]
    if not TARGETS.keys() >= {*targets}:
        parser.error(f"--target {arguments.target}: known are {_joined(TARGETS)}")
    if arguments.part:
        part, parts = map(int, arguments.part.split("/"))
        found = compile_all(targets[0], arguments.match, arguments.every, part, parts)
    else:
        print(f"triton {triton.__version__}, torch {torch.__version__}")
        columns = "warps stages    shared  regs stack programs/SM wgmma  mma  tc5     s"
        print(f"{'target':6} {'case':42} {'kernel':20} {columns}", flush=True)
        found = compile_in_parallel(targets, arguments.match, arguments.every, arguments.jobs)
        report(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
