"""`make try-wheel`: installs the wheel of dist/ as a user does, into an empty environment, and asks it something.

Nothing but that environment is on the path: no compiler. Further arguments are pip's, such as ``--extra-index-url URL``
for torch without NVIDIA's libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 60  # from the command to the answer, with the model on this machine


def main() -> int:
    """The command; returns the exit status."""
    (wheel,) = (ROOT / "dist").glob("octavo-*.whl")
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="octavo-try-") as scratch:
        programs = Path(scratch, "environment", "bin")
        subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True)
        started = time.monotonic()
        install: list[str | Path] = [
            programs / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*install, "--find-links", wheel.parent, *sys.argv[1:], f"octavo[cpu]=={version}"], check=True)
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
        bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "CC")}
        env = {**bare, "PATH": str(programs)}
        subprocess.run([programs / "octavo", "fetch", "--quiet"], env=env, cwd=scratch, check=True)
        started = time.monotonic()
        question: list[str | Path] = [
            programs / "octavo",
            "run",
            "smollm2-135m-instruct",
            "Name the capital of France.",
        ]
        done = subprocess.run(question, env=env, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        seconds = time.monotonic() - started
    print(f"{done.stdout}{done.stderr}answered in {seconds:.1f} s")
    # Without the kernels the answer is the same, but a warning says that it is slower.
    return int(done.returncode != 0 or "Paris" not in done.stdout or "slower" in done.stderr or seconds > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
