"""Lines that tell a waiting person what happens and how long it took."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class RigError(Exception):
    """What went wrong and the way out, for a person to read; no traceback is shown."""


def say(text: str) -> None:
    print(f"[rig] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{what}: FAILED after {time.monotonic() - start:.1f} s")
        raise
    say(f"{what}: {time.monotonic() - start:.1f} s")
