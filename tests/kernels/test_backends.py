"""Choosing a backend, and what happens on a machine where the C kernels cannot be had."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import octavo_kernels
from octavo_kernels import dispatch
from octavo_kernels.cpu import compiler, library

SMALL = """
import torch, octavo_kernels
from octavo_kernels import packing
x = torch.randn(4, 64)
octavo_kernels.rms_norm(x, torch.ones(64), 1e-6)
octavo_kernels.quantized_linear(x, packing.pack_w8(torch.randn(32, 64)))
print("ran")
"""


@pytest.fixture
def automatic(monkeypatch):
    monkeypatch.delenv(dispatch.ENV, raising=False)
    yield monkeypatch
    monkeypatch.undo()
    octavo_kernels.select_backend()


def run_without_compiler(tmp_path, code: str) -> subprocess.CompletedProcess:
    """Python where no library is built, none can be, and the home directory is empty."""
    setup = "from pathlib import Path; from octavo_kernels.cpu import compiler\n"
    setup += f"compiler.LIBRARIES = Path({str(tmp_path)!r})\n"
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, "-c", setup + code], env=environment, capture_output=True, text=True)


def test_the_variable_overrides_auto_and_the_argument_overrides_both(automatic):
    x = torch.ones(1, 4)
    assert octavo_kernels.select_backend() == "auto"
    assert dispatch.backend_for(x).__name__ == "octavo_kernels.cpu"
    automatic.setenv(dispatch.ENV, "reference")
    assert octavo_kernels.select_backend() == "reference"
    assert dispatch.backend_for(x).__name__ == "octavo_kernels.reference"
    assert octavo_kernels.select_backend("reference") == "reference"
    assert "reference" in octavo_kernels.available_backends()


def test_an_unknown_backend_is_refused_by_name(automatic):
    with pytest.raises(ValueError, match="backend='cuda' is not a kernel backend; choose one of auto, reference, cpu"):
        octavo_kernels.select_backend("cuda")
    automatic.setenv(dispatch.ENV, "fast")
    with pytest.raises(ValueError, match="OCTAVO_KERNEL_BACKEND='fast'"):
        octavo_kernels.select_backend()


def test_plain_torch_takes_over_without_a_compiler_and_says_so_once(tmp_path):
    result = run_without_compiler(tmp_path, SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ran\n"
    assert result.stderr.count("CPU kernels are unavailable") == 1
    assert "about 50 times slower" in result.stderr and "apt-get install gcc" in result.stderr
    assert "no C compiler found" in result.stderr and "Traceback" not in result.stderr


def test_asking_for_the_cpu_backend_by_name_fails_where_it_is_not(tmp_path):
    code = (
        "import octavo_kernels\ntry: octavo_kernels.select_backend('cpu')\n"
        "except octavo_kernels.BackendUnavailableError as e: print(e)"
    )
    result = run_without_compiler(tmp_path, code)
    assert "backend='cpu' cannot run here: no C compiler found" in result.stdout, result.stderr


def test_a_failing_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"error: out of luck\")'")
    with pytest.raises(compiler.BuildError, match="out of luck") as info:
        compiler.build(compiler.all_isas()[0], tmp_path)
    assert "\n" not in str(info.value)
    assert not list(tmp_path.iterdir()), "leftovers"


# A compiler that writes what it is asked for in no time, unless it does not know a flag.
PRETENDED = """
import sys
from pathlib import Path
if unknown := [flag for flag in {unknown} if flag in sys.argv]:
    sys.exit("error: unrecognized option " + unknown[0])
Path(sys.argv[sys.argv.index("-o") + 1]).write_text(" ".join(sys.argv))
"""


def pretend(monkeypatch, tmp_path, unknown=()):
    (tmp_path / "cc.py").write_text(PRETENDED.format(unknown=tuple(unknown)))
    monkeypatch.setenv("CC", f"{sys.executable} -S {tmp_path}/cc.py")


def test_an_old_compiler_leaves_out_what_it_does_not_know(monkeypatch, tmp_path):
    newest, *others = compiler.all_isas()
    own = set(compiler.flags(newest)) - {flag for isa in others for flag in compiler.flags(isa)}
    pretend(monkeypatch, tmp_path, own)
    built = compiler.build_several([newest, *others[-2:]], tmp_path / "lib")
    assert built == [tmp_path / "lib" / compiler.library_name(isa) for isa in others[-2:]]
    pretend(monkeypatch, tmp_path, ["-O3"])
    with pytest.raises(compiler.BuildError, match=f"failed for {newest}: error: unrecognized option -O3"):
        compiler.build_several([newest, *others], tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_library_is_linked_of_every_file_and_says_how_far_it_is(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path)
    isas, lines = compiler.all_isas()[:2], []
    for built in compiler.build_several(isas, tmp_path / "lib", lines.append):
        linked = built.read_text()
        assert all(f"-{file.stem}.o" in linked for file in compiler.SOURCES.glob("*.c")) and linked.count(".o ") > 10
    files = len(isas) * len(list(compiler.SOURCES.glob("*.c")))
    assert f"{files} files, once" in lines[0] and ", ".join(isas) in lines[0]
    assert f" {files} of {files} files, " in lines[-1]
    said = len(lines)
    compiler.build_several(isas, tmp_path / "lib", lines.append)
    assert len(lines) == said, "nothing is done twice"


def test_an_instruction_set_that_this_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setenv(library.ISA_ENV, "sve2")
    with pytest.raises(ValueError, match=r"OCTAVO_CPU_ISA='sve2' does not run on this CPU; choose one of"):
        library.load_best.__wrapped__()


NO_TILES = """
import ctypes, logging, sys
from octavo_kernels.cpu import compiler, library
targets, tiles = compiler._TARGETS["x86_64"], frozenset({"amx_tile", "amx_int8", "amx_bf16"})
flags = compiler._cpu_flags() | tiles
compiler._cpu_flags = lambda: flags  # a CPU that shows them,
targets[compiler.AMX] = targets[compiler.AMX][0], tiles  # and whatever else this one has
EPERM, ALLOW = 0x00050001, 0x7FFF0000
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # the number of the call at 0, its first argument at 16
def refuse(words):
    class Word(ctypes.Structure):
        _fields_ = [("c", ctypes.c_uint16), ("t", ctypes.c_uint8), ("f", ctypes.c_uint8), ("k", ctypes.c_uint32)]
    class Filter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_uint16), ("words", ctypes.POINTER(Word))]
    words += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    program = (Word * len(words))(*(Word(*word) for word in words))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(Filter(len(words), program))):
        sys.exit(77)  # no filters here
def manage(code, argument, ask=compiler._arch_prctl):
    if code != 0x1021:
        return ask(code, argument)
    ctypes.c_ulong.from_address(argument).value = 1 << 18
    return 0
if sys.argv[1] == "seccomp":
    refuse([(LOAD, 0, 0, 0), (IF_EQUAL, 0, 1, 158)])
elif sys.argv[1] == "permission":
    compiler._arch_prctl = manage  # as on a system that has tiles, which CPUs of other kinds lack
    refuse([(LOAD, 0, 0, 0), (IF_EQUAL, 0, 3, 158), (LOAD, 0, 0, 16), (IF_EQUAL, 0, 1, 0x1023)])
elif sys.argv[1] == "unmanaged":
    compiler._arch_prctl = lambda code, argument: 0
elif sys.argv[1] == "old":
    compiler._arch_prctl = lambda code, argument: 22
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
try:
    print("using", library.get_library().isa)
except ValueError as error:
    print(error)
"""
BEST_WITHOUT_TILES = next(iter(isa for isa in compiler.supported_isas() if isa != compiler.AMX), None)


@pytest.mark.skipif(compiler.machine() != "x86_64" or not BEST_WITHOUT_TILES, reason="is about x86-64's tiles")
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("wanted", [None, "amx"])
@pytest.mark.parametrize(
    "way, reason",
    [
        ("seccomp", "the system does not say that it manages them (Operation not permitted)"),
        ("permission", "the system does not permit them (Operation not permitted)"),
        ("old", "the system does not say that it manages them (Invalid argument)"),
        ("unmanaged", "the system does not manage them"),
    ],
)
def test_a_system_that_refuses_matrix_tiles_gets_the_next_best(way, reason, wanted):
    """A container's filter of system calls (a real one here), an old system, one that does not keep their state."""
    environment = {name: value for name, value in os.environ.items() if name != library.ISA_ENV}
    environment |= {"PYTHONPATH": ":".join(sys.path)} | ({library.ISA_ENV: wanted} if wanted else {})
    result = subprocess.run([sys.executable, "-c", NO_TILES, way], env=environment, capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip("this system lets no process filter its system calls")
    assert result.returncode == 0, result.stderr
    if wanted:
        assert f"OCTAVO_CPU_ISA='amx' does not run on this CPU: {reason}; choose one of" in result.stdout
        assert result.stdout.rstrip().endswith("baseline") and BEST_WITHOUT_TILES in result.stdout
    else:
        assert f"INFO CPU kernels: {BEST_WITHOUT_TILES}\n" in result.stdout
        assert f"WARNING This CPU has matrix units (AMX), but {reason}: " in result.stdout
        assert f"using {BEST_WITHOUT_TILES}" in result.stdout


@pytest.mark.skipif(compiler.machine() != "x86_64", reason="is about x86-64's tiles")
def test_matrix_tiles_are_used_where_cpu_and_system_have_them(monkeypatch):
    """The permission is asked for once it is known that the system keeps their state."""
    asked = []

    def grant(code, argument):
        asked.append(code)
        if code == 0x1021:
            ctypes.c_ulong.from_address(argument).value = 1 << 18 | 7
        return 0

    needed = compiler._TARGETS["x86_64"][compiler.AMX][1]
    monkeypatch.setattr(compiler, "_arch_prctl", grant)
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: needed)
    assert compiler.supported_isas()[:2] == ["amx", "avx512bf16"] and compiler.amx_refusal() is None
    assert asked == [0x1021, 0x1023] * 2
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: needed - {"amx_int8"})
    assert compiler.supported_isas() == ["avx512bf16"] and compiler.amx_refusal() is None
    assert len(asked) == 4, "asked for tiles that the CPU has not"


@pytest.mark.parametrize("missing", [None, "i8mm", "bf16"])
def test_matrix_instructions_of_arm_are_used_where_a_cpu_has_both_kinds(monkeypatch, missing):
    shown = {"fp", "asimd", "asimddp", "i8mm", "bf16"} - {missing}
    monkeypatch.setattr(compiler, "machine", lambda: "aarch64")
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: frozenset(shown))
    assert compiler.supported_isas() == (["dotprod", "baseline"] if missing else ["i8mm", "dotprod", "baseline"])


def test_a_mac_says_which_of_them_it_has(monkeypatch):
    """It has no /proc: the system answers by name, 1 or an error."""
    monkeypatch.setattr(compiler, "_sysctl", lambda name: name == b"hw.optional.arm.FEAT_BF16")
    assert compiler._flags_of_mac() == {"asimddp", "bf16"}


@pytest.mark.skipif(compiler.find_compiler() is None or not compiler.all_isas(), reason="needs a C compiler")
def test_several_builds_at_once_leave_one_whole_library(tmp_path, monkeypatch):
    sources = tmp_path.parent / f"{tmp_path.name}.csrc"  # small ones: the kernels themselves take half a minute
    sources.mkdir()
    (sources / "answer.c").write_text(
        'int answer(void);\n__attribute__((visibility("default"))) int answer(void) { return 42; }\n'
    )
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "LIBRARIES", tmp_path)
    isa = compiler.supported_isas()[-1]
    old = tmp_path / f"octavo_cpu-{compiler.machine()}-{isa}-0123456789ab.so"
    old.write_bytes(b"of other sources")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: compiler.build(isa, tmp_path), range(2)))
    assert set(tmp_path.iterdir()) == set(paths) and len(set(paths)) == 1
    assert ctypes.CDLL(str(paths[0])).answer() == 42


def test_a_library_refuses_calls_of_another_shape():
    chosen, _ = library.load_best()
    if chosen is None:
        pytest.skip("needs the C kernels")
    good = chosen.pack("silu_and_mul", 0, 0, 0, 16, 0)
    for bad in (good[:-8], b"\xff" * 8 + good[8:], (99).to_bytes(8, "little") + good[8:], good + good[:8]):
        with pytest.raises(RuntimeError, match="rebuild the kernels"):
            chosen.run(bad, 1)


@pytest.mark.parametrize("name", dispatch.BACKENDS)
def test_a_backend_takes_what_the_interface_takes(name):
    """Every function of the interface that takes tensors has a namesake in each backend, with the same parameters."""
    backend = importlib.import_module(f"octavo_kernels.{name}")
    offered = [each for each in vars(octavo_kernels).values() if inspect.isfunction(each)]
    functions = [each for each in offered if each.__module__.startswith("octavo_kernels.operations.")]
    assert len(functions) >= 40
    for function in functions:
        ours, theirs = inspect.signature(function), inspect.signature(getattr(backend, function.__name__))
        named = [p for p in theirs.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert list(ours.parameters.values()) == named, function.__name__
        assert ours.return_annotation == theirs.return_annotation
