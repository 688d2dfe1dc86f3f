"""Kinds of processor, and results that keep the figures of each: ratios of one say little about another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.system.limits import cpu_count, memory_limit


def cpu_flags() -> list[str]:
    """Those of the instruction sets that kernels of language models choose by."""
    x86 = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
    known = (*x86, "asimddp", "i8mm", "bf16")
    present = set(_cpuinfo().get("flags", _cpuinfo().get("Features", "")).split())
    return [name for name in known if name in present]


def better_dtype() -> str:
    """bfloat16 where the processor multiplies it, float32 where it would be emulated."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_flags()) else "float32"


def cpu_kind() -> str:
    """What tells processors of one kind from others: names alone do not, in virtual machines."""
    values = _cpuinfo()
    name = values.get("model name") or values.get("CPU part") or os.uname().machine
    number = f", family {values['cpu family']} model {values['model']}" if "cpu family" in values else ""
    return f"{name}{number}, {cpu_count()} cores, {memory_limit() / 2**30:.0f} GiB ({', '.join(cpu_flags())})"


def _cpuinfo() -> dict[str, str]:
    """Of the first processor."""
    values: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    return values


def load_results(path: Path) -> dict[str, Any]:
    """``{"cpus": {kind: figures}}``."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cpus": {}}
    return results


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.rename(path)
