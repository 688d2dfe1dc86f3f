"""The wheel: all of the packages, with the CPU kernels where they could be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo_kernels.cpu import compiler

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "server/octavo": "octavo",
    "kernels/octavo_kernels": "octavo_kernels",
    "operator/octavo_operator": "octavo_operator",
}


def source_tree(folder: Path) -> Path:
    """A copy of what a wheel is built of, without compiled kernels."""
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "lib"))
    return folder


def build(folder: Path, **env: str) -> tuple[zipfile.ZipFile, str]:
    """The wheel, and what was said while it was built."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel), done.stdout + done.stderr


def sources() -> set[str]:
    """Every file of the packages, as the wheel names it: pages and tables as well as modules."""
    return {
        f"{name}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, name in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "lib"} & set(path.parts)
    }


def test_without_a_compiler_it_is_whole_but_for_the_kernels(tmp_path: Path) -> None:
    wheel, said = build(source_tree(tmp_path), PATH="/nonexistent", CC="")
    assert sources() <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
    assert "CPU kernels left out of the wheel: no C compiler found" in said
    assert wheel.filename and wheel.filename.endswith("py3-none-any.whl")


@pytest.mark.skipif(not compiler.all_isas(), reason="there are no kernels for this architecture")
def test_compiled_kernels_come_along_for_every_instruction_set(tmp_path: Path) -> None:
    """So that where it is installed no compiler is needed."""
    folder = source_tree(tmp_path)
    libraries = folder / "kernels/octavo_kernels/cpu/lib"
    libraries.mkdir()
    for isa in compiler.all_isas():  # compiled before: a minute each
        (libraries / compiler.library_name(isa)).write_bytes(b"of " + isa.encode())
    wheel, _ = build(folder)
    names = {Path(name).name for name in wheel.namelist() if name.startswith("octavo_kernels/cpu/lib/")}
    assert names == {compiler.library_name(isa) for isa in compiler.all_isas()}
    assert wheel.filename and not wheel.filename.endswith("any.whl"), "it is for this kind of machine"
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"octavo = octavo.cli.main:main" in wheel.read(entry_points)
