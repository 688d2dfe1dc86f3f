"""`make release-check`: whether one version is named everywhere; with a tag, whether that version can be published.

A tag needs a dated section of CHANGELOG.md and nothing under "Unreleased". `--notes FILE` writes that section.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Every place that names the version.
PLACES = {
    "server/octavo/version.py": r'^__version__ = "(.+)"',
    "operator/octavo_operator/__init__.py": r'^__version__ = "(.+)"',
    "Makefile": r"^TAG \?= (.+)",
    "Dockerfile": r"^ARG VERSION=(.+)",
    "charts/octavo/Chart.yaml": r"^(?:version|appVersion): (.+)",
}


class ReleaseError(RuntimeError):
    """What keeps this commit from being a release, in a sentence."""


def versions(root: Path = ROOT) -> dict[str, set[str]]:
    """What each place says."""
    return {
        place: set(re.findall(pattern, (root / place).read_text(), re.MULTILINE)) for place, pattern in PLACES.items()
    }


def one_version(said: dict[str, set[str]]) -> str:
    """The version that all places name. Raises ReleaseError where they differ."""
    if len(every := set().union(*said.values())) != 1 or not all(said.values()):
        places = "; ".join(f"{place}: {', '.join(sorted(found)) or 'nothing'}" for place, found in said.items())
        raise ReleaseError(f"the version is not the same everywhere: {places}")
    return every.pop()


def sections(changelog: str) -> dict[str, str]:
    """CHANGELOG.md by the text of its headings: `[0.2.0] - 2026-11-29`."""
    parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)
    return {title: text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def notes(changelog: str, version: str) -> str:
    """What the changelog says of a version. Raises ReleaseError unless it can be published as it stands."""
    found = sections(changelog)
    if left := found.get("[Unreleased]"):
        raise ReleaseError(f"CHANGELOG.md has changes under [Unreleased]: move them to a version ({left[:60]!r} ...)")
    dated = {title: text for title, text in found.items() if title.startswith(f"[{version}]")}
    title = next(iter(dated), "")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", title):
        raise ReleaseError(f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'")
    return dated[title]


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", nargs="?", help="what is to be published, such as v0.2.0")
    parser.add_argument("--notes", type=Path, help="write the changelog's section of the tag there")
    arguments = parser.parse_args()
    try:
        version = one_version(versions())
        if arguments.tag:
            if arguments.tag != f"v{version}":
                raise ReleaseError(f"the tag is {arguments.tag}, the version {version}: tag v{version}, or change it")
            text = notes((ROOT / "CHANGELOG.md").read_text(), version)
            if arguments.notes:
                arguments.notes.write_text(text + "\n")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
