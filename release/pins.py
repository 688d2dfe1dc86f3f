"""`make release-pins`: whether an index has every pin of an image as a wheel, on both architectures.

Nothing is installed. A pin without a wheel would be compiled where an image is built, by compilers that it does not
have, and after hours of tests. Needs uv, and the index that it asks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# requirements/NAME.txt -> how the Dockerfile installs it.
PINS = {
    "build": [],
    "engine": [],
    "model": ["--no-deps"],
    "operator": [],
    "router": [],
    "serve": ["--no-deps"],
    "server": [],
}
PYTHON, GLIBC = "3.11", "2_36"  # of Debian bookworm, which the images come of
ARCHITECTURES = ("x86_64", "aarch64")


def command(name: str, architecture: str, folder: str) -> list[str]:
    """What asks for the pins of ``name`` on an architecture, as if it were installed into ``folder``."""
    platform = [f"--python-platform={architecture}-manylinux_{GLIBC}", f"--python-version={PYTHON}"]
    asked = ["--dry-run", "--quiet", "--require-hashes", "--only-binary=:all:", f"--target={folder}", *PINS[name]]
    return ["uv", "pip", "install", *asked, *platform, "-r", str(ROOT / "requirements" / f"{name}.txt")]


def main() -> int:
    """The command; returns the exit status."""
    if shutil.which("uv") is None:
        print("release: no uv here; `make release-pins` has one", file=sys.stderr)
        return 1
    lacking = 0
    with tempfile.TemporaryDirectory() as scratch:
        for architecture in ARCHITECTURES:
            for name in PINS:
                done = subprocess.run(command(name, architecture, scratch), capture_output=True, text=True)
                if done.returncode:
                    print(f"{name} on {architecture}: {done.stderr.strip()}", file=sys.stderr)
                    lacking += 1
            if not lacking:
                print(f"{architecture}: every pin of {', '.join(PINS)} is there as a wheel")
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())
