"""Every package of the product has its floor in an import contract, and no module hides one of the standard library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT / one
    for one in ("server/octavo", "kernels/octavo_kernels", "operator/octavo_operator", "operator/octavo_router")
]


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    for package in PACKAGES:
        names = {path.stem for path in package.rglob("*.py")} | {path.name for path in package.rglob("*/")}
        assert not names & sys.stdlib_module_names, package


def test_every_file_is_laid_out_by_the_formatter_and_has_at_most_500_lines() -> None:
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= 500, f"{file} is too long: give what it does besides a file of its own"
        assert "# fmt:" not in text, file


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_folder_without_a_contract_fails_the_lint(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / package.parent.name / package.name
    for other in PACKAGES:
        shutil.copytree(
            other, tmp_path / other.parent.name / other.name, ignore=shutil.ignore_patterns("__pycache__", "lib")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (copy / "attic").mkdir()
    (copy / "attic/__init__.py").touch()
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and f"{package.name}.attic" in done.stdout, done.stdout


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    path = [str(folder / package.parent.name) for package in PACKAGES]
    command = (
        "import sys; sys.path[:0] = sys.argv[1:]; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    return subprocess.run(
        [sys.executable, "-c", command, *path], cwd=folder, capture_output=True, text=True, check=False
    )
