"""Pages that reading a body takes from the kernel anew, which cost as much as reading it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_COUNT = """
import json, resource
from octavo_router.__main__ import keep_memory
from octavo_router.prompt import read_prompt
keep_memory()
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "words and words " * 25_000}]}).encode()
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read_prompt(body)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[len(faults) // 2])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have their own ways")
def test_a_body_is_read_in_memory_that_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20  # of some 260 for the copies of 400 KB
