"""Wheels built as `make wheel` builds them, and the environment that the README makes of one.

That is: what requirements/serve.txt lists and the wheel, on an empty virtual environment, for an ordinary user with a
home of their own, without a compiler on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo_kernels.cpu import compiler

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "server/octavo": "octavo",
    "kernels/octavo_kernels": "octavo_kernels",
    "operator/octavo_operator": "octavo_operator",
    "operator/octavo_router": "octavo_router",
}
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
# What documented commands may count on beside the environment's own: no compiler, no linker, no make.
TOOLS = (
    "bash",
    "cat",
    "curl",
    "echo",
    "env",
    "git",
    "head",
    "ls",
    "mkdir",
    "rm",
    "sed",
    "sh",
    "sleep",
    "tail",
    "uname",
)
_NOBODY = 65534


def source_tree(folder: Path, kernels: bool = False) -> Path:
    """A copy of what a wheel is built of; with ``kernels`` those that are compiled here already."""
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "lib"))
    libraries = folder / "kernels/octavo_kernels/cpu/lib"
    for isa in compiler.all_isas() if kernels else ():
        if (compiled := compiler.LIBRARIES / compiler.library_name(isa)).exists():  # by `make setup`; else now
            libraries.mkdir(exist_ok=True)
            shutil.copy(compiled, libraries)
    return folder


def build(folder: Path, **env: str) -> tuple[zipfile.ZipFile, str]:
    """The wheel, and what was said while it was built."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel), done.stdout + done.stderr


@dataclass(frozen=True)
class Environment:
    """An environment with the wheel. ``folder`` is the ordinary user's own, who owns no file of a package."""

    folder: Path
    variables: dict[str, str]
    owner: dict[str, Any]  # arguments of subprocess: whose processes they are

    @property
    def programs(self) -> Path:
        """Where `octavo` and `python` are."""
        return self.folder / "environment" / "bin"

    def run(self, *command: str | Path, where: Path | None = None, timeout: float = 120) -> tuple[int, str, str]:
        """Run a command to its end, without input; its status and what it printed."""
        done = subprocess.run(
            command,
            cwd=where or self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            **self.owner,
        )
        return done.returncode, done.stdout, done.stderr

    def empty_folder(self) -> Path:
        """A new folder of the user's."""
        made = Path(tempfile.mkdtemp(dir=self.folder))
        _give([made], self.owner)
        return made

    def add(self, *packages: str) -> Environment:
        """This with packages beside what the README installs, in the tests' versions: clients that people have."""
        where = ["--target", self.folder / "clients", "--python", self.programs / "python"]
        subprocess.run([*UV, *where, "-c", ROOT / "requirements/dev.txt", *packages], check=True, timeout=300)
        _give([Path(name) for name, _, _ in os.walk(self.folder / "clients")], self.owner)
        return replace(self, variables={**self.variables, "PYTHONPATH": str(self.folder / "clients")})

    @contextmanager
    def serving(self, *flags: str) -> Iterator[str]:
        """A server on the embedded model, as `make serve` starts it; its address."""
        command = [self.programs / "octavo", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        log = self.folder / "serve.log"
        with (
            log.open("wb") as out,
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                **self.owner,
            ) as process,
        ):
            try:
                deadline = time.monotonic() + 120
                while (found := re.search(r"serving .* at (http\S+)", log.read_text())) is None:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
                yield found[1]
            finally:
                process.kill()


@contextmanager
def readme_environment(python: str = sys.executable, models: Path | None = None) -> Iterator[Environment]:
    """The environment by ``python``. ``models``: a cache of Octavo's whose models need not be fetched once more."""
    with tempfile.TemporaryDirectory(prefix="octavo-readme-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        owner = {} if os.geteuid() else {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        base = _interpreter(python, folder) if owner else Path(python)
        subprocess.run([base, "-m", "venv", "--without-pip", folder / "environment"], check=True)
        (folder / "source").mkdir()
        wheel, _ = build(source_tree(folder / "source", kernels=True))
        uv = [*UV, "--python", folder / "environment/bin/python"]
        subprocess.run([*uv, "--no-deps", "-r", ROOT / "requirements/serve.txt"], check=True, timeout=600)
        subprocess.run([*uv, "--no-deps", str(wheel.filename)], check=True, timeout=60)
        home = folder / "home"
        if models is not None:
            shutil.copytree(models, home / ".cache/octavo/pypi", symlinks=True)
        home.mkdir(exist_ok=True)
        _give([folder, *(Path(name) for name, _, _ in os.walk(folder / "environment"))], owner)
        _give([home, *home.rglob("*")], owner)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("VIRTUAL_ENV", "CC") and not name.startswith(("PYTHON", "XDG_", "HF_", "OCTAVO_"))
        }
        variables |= {"HOME": str(home), "PATH": f"{folder / 'environment/bin'}:{_tools(folder / 'tools')}"}
        if (folder / "python").exists():  # its own library is not where it was built for
            variables["LD_LIBRARY_PATH"] = str(folder / "python/lib")
        yield Environment(folder, variables, owner)


def _give(paths: list[Path], owner: dict[str, Any]) -> None:
    """Make the ordinary user own folders, so that Python may write there what it compiles; files stay root's, since
    they are those of uv's cache, too."""
    for path in paths if owner else ():
        os.chown(path, owner["user"], owner["group"], follow_symlinks=False)


def _tools(folder: Path) -> Path:
    folder.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    assert not [name for name in ("cc", "gcc", "clang", "make") if shutil.which(name, path=str(folder))]
    return folder


def _interpreter(python: str, folder: Path) -> Path:
    """An interpreter that everybody may run: ``python``'s own, or a copy by links where it lies in root's home."""
    tell = "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2])"
    said = subprocess.run([python, "-S", "-c", tell], capture_output=True, text=True, check=True).stdout.split()
    prefix, version = Path(said[0]), said[1]
    if all(part.stat().st_mode & 0o005 == 0o005 for part in (prefix, *prefix.parents)):
        return prefix / "bin" / f"python{version}"
    unused = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "share", "*.a")
    shutil.copytree(prefix, folder / "python", symlinks=True, ignore=unused, copy_function=_link)
    return folder / "python" / "bin" / f"python{version}"


def _link(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system
        shutil.copy2(source, place)
