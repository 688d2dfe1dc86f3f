"""What the functions of the CPU backend share: the library in use and the dtypes that it knows."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from octavo_kernels.cpu import library

logger = logging.getLogger("octavo_kernels")

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/simd.h: enum dtype

_library: library.Library | None = None
_loaded = False


def get_library() -> library.Library | None:
    """The library for this CPU, loaded at the first call; None (said once) when there is none."""
    global _library, _loaded
    if not _loaded:
        _library, reason = library.best()
        _loaded = True
        if _library is None:
            logger.warning("CPU kernels are not there, plain torch is used instead, about 50 times slower: %s", reason)
    return _library


def use_library(chosen: library.Library | None) -> None:
    """Use this library from now on, or plain torch if None (tests compare instruction sets with it)."""
    global _library, _loaded
    _library, _loaded = chosen, True


def unavailable_reason() -> str | None:
    """Why the C kernels cannot run here, or None."""
    return None if get_library() is not None else library.best()[1] or "switched off"


def dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` contiguous, and of ``dtype`` if one is given; usually ``x`` itself."""
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()
