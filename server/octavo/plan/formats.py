"""Advice on formats of weights: the fastest on a CPU, by what docs/performance.md and docs/measurements.md measured."""

from __future__ import annotations

import platform
from pathlib import Path

from octavo.system.limits import has_matrix_units

_WITH_AMX = (
    "with AMX 4 bits are the fastest for one user; for many a W8A8 checkpoint or --quantization int8 "
    "(int8_per_channel); for long prompts bfloat16: matrix units multiply rows of 8 and 16 bits, not groups of 4"
)
_WITH_VNNI = (
    "4 bits (a Q4 GGUF file) are the fastest for one user, whom memory limits, and beside a W8A8 checkpoint for many "
    "users and long prompts, whom arithmetic limits: both are multiplied as integers"
)
_OTHER = (
    "4 bits (a Q4 GGUF file) are the fewest bytes to read for a token, which is what limits one user on any CPU; not "
    "measured on one like this"
)


def fast_formats(info: Path = Path("/proc/cpuinfo")) -> str:
    """Say which formats are the fastest on this machine's CPU, and why."""
    if has_matrix_units(info):
        return _WITH_AMX
    try:
        flags = set(info.read_text().split())
    except OSError:
        flags = set()
    return _WITH_VNNI if platform.machine() == "x86_64" and "avx512_vnni" in flags else _OTHER
