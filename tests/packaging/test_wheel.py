"""The wheel: all of the packages, with the CPU kernels where they could be compiled; where it is installed, it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.wheels import PACKAGES, ROOT, UV, build, source_tree

from octavo.version import __version__
from octavo_kernels.cpu import compiler

EXTRA = ["--find-links", "FOLDER", "-c", str(ROOT / "requirements/dev.txt"), f"octavo[cpu]=={__version__}"]
RUNTIME = "nvidia-cuda-runtime"  # without which PyPI's torch is not loaded


def sources() -> set[str]:
    """Every file of the packages, as the wheel names it: pages and tables as well as modules."""
    return {
        f"{name}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, name in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "lib"} & set(path.parts)
    }


def test_the_wheel_is_whole_without_a_compiler_but_for_the_kernels(tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(compiler.find_compiler() is None, reason="a wheel with kernels needs a compiler once")
@pytest.mark.parametrize(
    "words",
    [
        # by the extra, from an index that is a folder; in the versions that `make setup` has fetched already. By
        # requirements/serve.txt every documented command runs: tests/docs/test_blocks.py
        pytest.param([*EXTRA, "--excludes", str(ROOT / "requirements/serve.excludes"), RUNTIME], id="without-nvidia"),
        # with all that PyPI's torch asks for: 2.8 GB
        pytest.param(EXTRA, id="all", marks=pytest.mark.long),
    ],
)
def test_in_an_empty_environment_without_a_compiler_run_answers(words: list[str], tmp_path: Path) -> None:
    folder = source_tree(tmp_path, kernels=True)
    build(folder)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    named = [word.replace("FOLDER", str(folder / "dist")) for word in words]
    subprocess.run([*UV, "--python", environment / "bin" / "python", *named], check=True, timeout=600)
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "CC")}
    fetch = [environment / "bin" / "octavo", "fetch", "--quiet"]
    subprocess.run(fetch, cwd=tmp_path, env={**bare, "PATH": str(environment / "bin")}, check=True, timeout=300)
    done = subprocess.run(
        [environment / "bin" / "octavo", "run", "smollm2-135m-instruct", "Name the capital of France."],
        cwd=tmp_path,
        env={**bare, "PATH": str(environment / "bin")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done.stdout + done.stderr
    assert "slower" not in done.stderr, "torch computes in place of the kernels"
    installed = {path.name for path in environment.rglob("octavo_kernels/cpu/lib/*.so")}
    assert compiler.library_name(compiler.supported_isas()[0]) in installed
    shutil.rmtree(environment)
