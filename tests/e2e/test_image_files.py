"""What the images are made of: pinned, the same everywhere, and without a word of where it was fetched from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.loader.pypi import PackageFile
from octavo.loader.sources import ALIASES, DEFAULT_MODEL

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_the_image_carries_the_model_that_the_alias_means() -> None:
    what = PackageFile.parse(ALIASES[DEFAULT_MODEL])
    assert pins("model") == {what.dist: what.version}


@pytest.mark.parametrize("name", ["engine", "server", "operator", "build", "model"])
def test_every_package_is_pinned_by_hashes_that_the_tests_run_with_too(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert all("--hash=sha256:" in part for part in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:])
    tested = pins("dev")
    assert {k: v for k, v in pins(name).items() if k in tested} == {k: tested[k] for k in pins(name) if k in tested}


def test_the_first_layer_of_packages_is_part_of_the_second() -> None:
    engine, server = pins("engine"), pins("server")
    assert engine.items() <= server.items(), "else torch's layer would be changed by the one above it"


def test_nothing_says_where_packages_come_from() -> None:
    for file in ("Dockerfile", *(f"requirements/{p.name}" for p in (ROOT / "requirements").glob("*.txt"))):
        text = (ROOT / file).read_text()
        assert "--index-url" not in text and "--find-links" not in text and "http://" not in text, file
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    fetching = [stage for stage in stages if re.search(r"pip install (?!--offline)", stage)]
    assert fetching and all("ARG SSL_CERT_FILE" in stage for stage in fetching), "certificates of a proxy"
