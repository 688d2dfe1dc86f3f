"""The release's workflow: what it runs is there, for both architectures; nothing is published before it is tested."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
JOBS: dict[str, dict[str, Any]] = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
MAKEFILE = (ROOT / "Makefile").read_text()


def steps(job: str) -> list[dict[str, Any]]:
    return list(JOBS[job].get("steps", []))


def before(job: str) -> set[str]:
    """The jobs that must have succeeded."""
    needs = JOBS[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct | {far for one in direct for far in before(one)}


def test_it_makes_what_the_makefile_can_make() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    run = "\n".join(step.get("run", "") for job in JOBS for step in steps(job))
    made = set(re.findall(r"\bmake ([\w-]+)", run))
    assert made == {"release-check", "release-pins", "wheel", "try-wheel", "chart", "sbom"}
    assert made <= targets


@pytest.mark.parametrize("file", sorted(path.name for path in WORKFLOWS.glob("*.yml")))
def test_actions_are_pinned_by_a_version_and_rights_are_few(file: str) -> None:
    workflow = yaml.safe_load((WORKFLOWS / file).read_text())
    used = re.findall(r"uses: (\S+)", (WORKFLOWS / file).read_text())
    assert used and all(one.startswith("./") or re.search(r"@v\d+(\.\d+){0,2}$", one) for one in used)
    assert all((ROOT / one).exists() for one in used if one.startswith("./"))
    assert workflow["permissions"] == {"contents": "read"}


def test_every_image_is_built_on_both_architectures_without_emulation() -> None:
    images = re.findall(r"^IMAGES \?= (operator .*)$", MAKEFILE, re.MULTILINE)[0].split()
    matrix = JOBS["image"]["strategy"]["matrix"]
    assert matrix["image"] == images == JOBS["publish-images"]["strategy"]["matrix"]["image"]
    runners = {one["name"]: one["runner"] for one in matrix["platform"]}
    assert runners.keys() == {"amd64", "arm64"} and runners["arm64"].endswith("-arm")
    wheels = {one["machine"]: one["runner"] for one in JOBS["wheel"]["strategy"]["matrix"]["include"]}
    assert wheels.keys() == {"x86_64", "aarch64"} and wheels["aarch64"].endswith("-arm")
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert set(images) <= targets
    (build,) = (step for step in steps("image") if "build-push-action" in step.get("uses", ""))
    assert build["with"]["sbom"] is True and build["with"]["provenance"] == "mode=max"
    arguments = {line.partition("=")[0] for line in build["with"]["build-args"].split("\n") if line}
    assert arguments == {"BASE", "VERSION", "REVISION"}
    (told,) = re.findall(r"for image in ([\w -]+); do", "".join(step.get("run", "") for step in steps("publish-chart")))
    assert told.split() == images, "the chart names every image by its digest"


def test_pins_are_asked_for_as_the_images_install_them() -> None:
    dockerfile = re.sub(r" *\\\n *", " ", (ROOT / "Dockerfile").read_text())
    installed = re.findall(r"uv pip install ([^|&\n]*?)-r (?:/opt/octavo)?/requirements/(\w+)\.txt", dockerfile)
    spec = importlib.util.spec_from_file_location("pins", ROOT / "release/pins.py")
    assert spec is not None and spec.loader is not None
    pins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pins)
    assert {name: ["--no-deps"] if "--no-deps" in flags else [] for flags, name in installed} | {
        "build": []
    } == pins.PINS
    assert ("--no-deps" in pins.command("serve", "aarch64", "/x")) and all(
        f"--python-platform={one}-manylinux_2_36" in pins.command("router", one, "/x") for one in pins.ARCHITECTURES
    )


def test_nothing_is_published_before_it_is_tested_and_all_of_it_is_signed() -> None:
    publishing = [job for job in JOBS if job.startswith("publish-")]
    assert len(publishing) == 4
    for job in publishing:
        assert {"check", "test", "wheel", "image"} <= before(job), job
    assert {"publish-images", "publish-chart"} <= before("publish-wheels"), "a file on PyPI cannot be taken back"
    writing = {job for job, what in JOBS.items() if "write" in what.get("permissions", {}).values()}
    assert writing == {*publishing, "image"}
    for job in ("publish-images", "publish-chart"):
        assert any("cosign sign --yes" in step.get("run", "") for step in steps(job))
        assert any("attest-build-provenance" in step.get("uses", "") for step in steps(job))
    (pypi,) = (step for step in steps("publish-wheels") if "pypi-publish" in step.get("uses", ""))
    assert pypi["with"] == {"attestations": True} and JOBS["publish-wheels"]["permissions"] == {"id-token": "write"}


def test_users_are_told_who_signs() -> None:
    told = (ROOT / "docs/install.md").read_text()
    signers = re.findall(
        r'--certificate-identity "https://github\.com/octavo-dev/octavo/(\S+)@refs/tags/v\$VERSION"', told
    )
    assert {ROOT / one for one in signers} == {WORKFLOWS / "release.yml"}


def test_the_tests_of_a_release_are_those_of_a_change() -> None:
    assert JOBS["test"] == {"uses": "./.github/workflows/ci.yml"}
    assert "workflow_call:" in (WORKFLOWS / "ci.yml").read_text()


def test_clients_are_tried_each_week_and_when_what_they_speak_to_changes() -> None:
    workflow = yaml.safe_load((WORKFLOWS / "clients.yml").read_text())
    triggers, (job,) = workflow[True], workflow["jobs"].values()  # YAML reads "on" as true
    assert triggers["schedule"] and triggers["push"]["paths"] == triggers["pull_request"]["paths"]
    assert all((ROOT / path.removesuffix("/**")).exists() for path in triggers["push"]["paths"])
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make clients"]
