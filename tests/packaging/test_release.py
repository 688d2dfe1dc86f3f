"""A release: one version everywhere, notes that are whole, a README that reads the same on a package's page."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check, wheel = load("release/check.py"), load("release/wheel.py")


def test_one_version_is_named_everywhere() -> None:
    version = check.one_version(check.versions())
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    newest = next(title for title in check.sections((ROOT / "CHANGELOG.md").read_text()) if title != "[Unreleased]")
    assert newest.startswith(f"[{version}] - "), "what is built is called as what was published last, or is next"


def test_a_version_that_one_place_forgot_is_told_by_the_place() -> None:
    said = {**check.versions(), "Makefile": {"9.9.9"}}
    with pytest.raises(check.ReleaseError, match=r"Makefile: 9\.9\.9"):
        check.one_version(said)
    with pytest.raises(check.ReleaseError, match=r"Dockerfile: nothing"):
        check.one_version({**check.versions(), "Dockerfile": set()})


@pytest.mark.parametrize(
    ("changelog", "why"),
    [
        ("## [Unreleased]\n- new\n\n## [1.0.0] - 2026-01-01\n- a\n", "under .Unreleased."),
        ("## [Unreleased]\n\n## [1.0.0]\n- a\n", "no heading"),
        ("## [Unreleased]\n\n## [1.0.00] - 2026-01-01\n- a\n", "no heading"),
    ],
)
def test_a_changelog_that_is_not_ready_keeps_a_tag_from_being_published(changelog: str, why: str) -> None:
    with pytest.raises(check.ReleaseError, match=why):
        check.notes(changelog, "1.0.0")


def test_the_notes_are_the_sections_own() -> None:
    changelog = "# C\n\n## [Unreleased]\n\n## [1.1.0] - 2026-02-01\n### Added\n- b\n\n## [1.0.0] - 2026-01-01\n- a\n"
    assert check.notes(changelog, "1.1.0") == "### Added\n- b"


def test_the_readme_of_the_package_leads_to_files_of_that_version() -> None:
    pytest.importorskip("hatchling")
    elsewhere = load("hatch_build.py").readme_elsewhere
    text = (ROOT / "README.md").read_text()
    shown = elsewhere(text, "1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)", shown)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)", text)) > 20
    assert all(target.startswith(("https://", "#")) for target in targets)
    for target in targets:
        if (path := target.partition("/v1.2.3/")[2].partition("#")[0]) != "":
            assert (ROOT / path).exists(), path
    assert "/raw/v1.2.3/docs/overview.svg" in shown and "/blob/v1.2.3/docs/install.md" in shown


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("octavo-1-py3-none-manylinux_2_28_x86_64.whl", [], "lacks kernels"),
        ("octavo-1-py3-none-linux_x86_64.whl", None, "refuses"),
        ("octavo-1-py3-none-any.whl", None, "refuses"),
        ("octavo-1-py3-none-manylinux_2_28_x86_64.whl", None, None),
    ],
)
def test_a_wheel_is_published_with_all_kernels_and_a_known_platform_alone(
    name: str, files: list[str] | None, why: str | None, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for file in wheel.missing_kernels([]) if files is None else files:
            archive.writestr(file, "")
    if why is None:
        wheel.check(tmp_path / name)
    else:
        with pytest.raises(wheel.ReleaseError, match=why):
            wheel.check(tmp_path / name)


def test_the_image_for_cpus_is_tried_with_every_step_that_makes_it() -> None:
    tried = load("release/try_cpu_image.py").steps((ROOT / "Dockerfile").read_text(), "cpu-packages")
    assert all(
        any(word in step for step in tried) for word in ("serve.txt", "cpu_torch.py", "import torch", "model.txt")
    )
    assert not [step for step in tried if step.endswith("\\")], "continued lines are one step"
