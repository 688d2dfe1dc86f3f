"""Build the environment of a child process: variables that its work may need, and none of the server's secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Folders, languages, the terminal, compilers; the system's libraries, Python, threads and arithmetic; GPUs and what
# connects them; our own.
_NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|NO_COLOR|LANG|LANGUAGE|TZ|TMPDIR|TEMP|TMP|HOSTNAME|VIRTUAL_ENV|CC|CXX|CPATH"
    r"|(C_INCLUDE|CPLUS_INCLUDE|LIBRARY)_PATH|GLIBC_TUNABLES|TOKENIZERS_PARALLELISM"
    r"|(LC|LD|MALLOC|XDG|CONDA|COVERAGE|ASAN|LSAN|TSAN|UBSAN|OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|RAYON|RUST)_.*"
    r"|(PYTHON|TORCH|CUDA|CUBLAS|CUDNN).*|(PYTORCH|TRITON|NVIDIA|NVTE|NCCL|GLOO|UCX|FI)_.*"
    r"|(ROCR|ROCM|HIP|HSA|AMD|RCCL|ZE|RAY|OCTAVO)_.*"
)
RAY_SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TLS_SERVER_KEY")  # of who talks to Ray
_SECRET = re.compile(r"(^|_)(AUTH|AUTHORIZATION|CREDENTIALS?|KEYS?|PASS(WORD|WD|PHRASE)?|SECRETS?|TOKENS?)(_|$)")


def process_environment(*secrets: str, source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The part of ``source`` that a process of ours is given; of names that sound like secrets, only ``secrets``."""
    return {name: value for name, value in source.items() if name in secrets or _is_harmless(name)}


def _is_harmless(name: str) -> bool:
    return _NEEDED.fullmatch(name) is not None and _SECRET.search(name.upper()) is None
