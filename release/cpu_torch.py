"""PyPI's torch without CUDA, for the image server-cpu: the code for GPUs and all of NVIDIA's packages go.

    cpu_torch.py SITE-PACKAGES

Torch's own libraries stay, without the programs for GPUs that are most of them and without the tables of symbols that
no loader reads. NVIDIA's libraries are replaced by small ones that define what torch asks for; CUDA's runtime says that
there is no device. So `import torch` works plainly, `torch.cuda.is_available()` is False, and the wheel is the one that
is pinned by its hash and tested. Needs a C compiler and readelf; for Linux on x86-64 and arm64.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

UNUSED_LIBRARIES = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")  # loaded where a GPU needs them
NOT_AT_RUN_TIME = ("include", "bin/protoc*", "share")  # what extensions are compiled with
PROGRAMS_FOR_GPUS = ".nv_fatbin"
NO_DEVICE = 100  # cudaErrorNoDevice
PAGE = 65536  # arm64's largest
PT_LOAD, PT_NOTE = 1, 4

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct(
    "<IIQQQQQQ"
)  # type, flags, offset, address, physical address, bytes in file, in memory, alignment
_LIBRARY_OF_NVIDIA = re.compile(r"lib(cu|nccl|nv)[\w-]*\.so\.\d+")  # all else, libz of arm64's, is the system's
_OF_NVIDIA = re.compile(r"(__cuda|cu[a-z]*[A-Z]|cublas|cudnn|cufft|curand|cusparse|nccl|nvrtc|nvshmem|nvtx)")


def readelf(option: str, library: Path) -> str:
    """What readelf says of a library."""
    return subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> set[str]:
    """The libraries that it is linked with."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", library)))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """The names that it defines, and those that it asks for; a version stands behind an @."""
    defined, wanted = set(), set()
    for line in readelf("--dyn-syms", library).splitlines():
        # "  74: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cuptiFinalize@libcupti.so.13 (10)"
        if (parts := line.split()) and len(parts) > 7 and parts[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            if parts[6] != "UND":
                defined.add(parts[7].partition("@")[0])
            elif parts[4] == "GLOBAL":
                wanted.add(parts[7])
    return defined, wanted


def versions(library: Path) -> dict[str, str]:
    """The versions of symbols that it asks for, each with the library that is to have it."""
    found, file = {}, ""
    for line in readelf("--version-info", library).splitlines():
        # "  0x0010: Version: 1  File: libcudart.so.13  Cnt: 1", then "  0x0020:   Name: libcudart.so.13  Flags: none"
        if named := re.search(r" File: (\S+) ", line):
            file = named[1]
        elif (one := re.search(r" Name: (\S+) ", line)) and file:
            found[one[1]] = file
    return found


def asked_of_nvidia(libraries: list[Path], stubs: list[str]) -> dict[str, dict[str, set[str]]]:
    """What ``libraries`` ask of NVIDIA's: stub -> version -> names. Those without a version are the first stub's."""
    defined: set[str] = set()
    wanted: set[str] = set()
    homes: dict[str, str] = {}
    for library in libraries:
        here, there = symbols(library)
        defined |= here
        wanted |= there
        homes |= versions(library)
    found: dict[str, dict[str, set[str]]] = {stub: defaultdict(set) for stub in stubs}
    for version, home in homes.items():
        if home in stubs:
            found[home][version] = set()
    for name in wanted:
        symbol, _, version = name.partition("@")
        if homes.get(version) in stubs:
            found[homes[version]][version].add(symbol)
        elif not version and symbol not in defined and _OF_NVIDIA.match(symbol):
            found[stubs[0]][""].add(symbol)
    return found


def compile_stub(name: str, names: dict[str, set[str]], folder: Path) -> None:
    """Write the library ``name`` with these functions, by their versions. All say that there is no device."""
    code = [f"int {symbol}(void) {{ return {NO_DEVICE}; }}" for symbol in sorted(set().union(*names.values()))]
    script = [
        f"{version} {{ global: {'; '.join([*sorted(of_it), ''])}}};" for version, of_it in names.items() if version
    ]
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "stub.c").write_text("\n".join(code) + "\n")
        Path(scratch, "versions").write_text("\n".join(script) + "\n")
        links = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={scratch}/versions"] if script else [])]
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-w", "-nostdlib", *links]
        subprocess.run([*compiler, f"{scratch}/stub.c", "-o", folder / name], check=True)


def section(library: Path, name: str) -> tuple[int, int]:
    """Address and size of a section; 0, 0 where there is none."""
    found = re.search(rf" {re.escape(name)} +\w+ +([0-9a-f]+) [0-9a-f]+ ([0-9a-f]+)", readelf("--sections", library))
    return (int(found[1], 16), int(found[2], 16)) if found else (0, 0)


def pieces(segment: tuple[int, ...], hole: tuple[int, int]) -> list[tuple[int, ...]]:
    """A loaded segment without the whole pages of a hole (address, size)."""
    kind, flags, offset, address, _, stored, memory, alignment = segment
    begin, end = -(-hole[0] // PAGE) * PAGE, (hole[0] + hole[1]) // PAGE * PAGE
    if not (address <= hole[0] < address + stored) or begin >= end:
        return [segment]
    skip = end - address
    return [
        (kind, flags, offset, address, address, begin - address, begin - address, alignment),
        (kind, flags, offset + skip, end, end, stored - skip, memory - skip, alignment),
    ]


def shrink(library: Path) -> None:
    """Write a library anew with what is loaded of it, and without programs for GPUs: no sections, no symbol tables."""
    data = library.read_bytes()
    header = list(_HEADER.unpack_from(data))
    table, count = header[5], header[10]
    segments = [_SEGMENT.unpack_from(data, table + i * _SEGMENT.size) for i in range(count)]
    hole = section(library, PROGRAMS_FOR_GPUS)
    loaded = [piece for one in segments if one[0] == PT_LOAD for piece in pieces(one, hole)]
    others = [one for one in segments if one[0] not in (PT_LOAD, PT_NOTE)]
    first_page = loaded[0]
    if len(loaded) + len(others) > count or first_page[2] != 0 or table != _HEADER.size:
        return  # no room for another line in the table: it stays as it is
    out = bytearray(data[: first_page[5]])
    moved = [first_page]
    for kind, flags, offset, address, physical, stored, memory, alignment in loaded[1:]:
        place = len(out) + (address - len(out)) % alignment  # offset and address agree in a page
        out += bytes(place - len(out)) + data[offset : offset + stored]
        moved.append((kind, flags, place, address, physical, stored, memory, alignment))

    def new_offset(address: int, old: int) -> int:
        homes = [one for one in moved if one[3] <= address < one[3] + max(one[6], 1)]
        return homes[0][2] + address - homes[0][3] if homes else old

    rest = [(one[0], one[1], new_offset(one[3], one[2]) if one[6] else 0, *one[3:]) for one in others]
    lines = moved + rest
    lines += [(0,) * 8] * (count - len(lines))
    for number, line in enumerate(lines):
        _SEGMENT.pack_into(out, table + number * _SEGMENT.size, *line)
    header[6], header[11], header[12], header[13] = 0, 0, 0, 0  # no table of sections
    _HEADER.pack_into(out, 0, *header)
    mode = library.stat().st_mode
    library.unlink()
    library.write_bytes(out)
    os.chmod(library, mode)


def strip(site: Path) -> None:
    """Take CUDA out of the torch that is installed in ``site``."""
    torch = site / "torch"
    folder = torch / "lib"
    for pattern in NOT_AT_RUN_TIME:
        for path in torch.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in UNUSED_LIBRARIES:
        (folder / name).unlink(missing_ok=True)
    libraries = sorted(folder.glob("*.so*"))
    asked = set().union(*map(needed, libraries))
    there = {path.name for path in libraries}
    stubs = sorted(name for name in asked - there if _LIBRARY_OF_NVIDIA.fullmatch(name))
    found = asked_of_nvidia(libraries, stubs)
    for library in libraries:
        before = library.stat().st_size
        shrink(library)
        print(f"{library.name}: {before / 1e6:.1f} -> {library.stat().st_size / 1e6:.1f} MB")
    for name in stubs:
        compile_stub(name, found[name], folder)
        print(f"{name}: {sum(map(len, found[name].values()))} functions in its place")


if __name__ == "__main__":
    strip(Path(sys.argv[1]))
