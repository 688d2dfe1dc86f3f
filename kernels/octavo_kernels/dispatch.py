"""The choice of the backend that serves a call."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

ENV = "OCTAVO_KERNEL_BACKEND"
BACKENDS = ("reference", "cpu", "triton")

_forced: ModuleType | None = None  # a backend for every tensor, whatever its device
_selected = False


class BackendUnavailableError(RuntimeError):
    """The selected backend cannot run on this machine; the message says why and what to do."""


def select_backend(name: str = "auto") -> str:
    """Select the backend of this process: "auto" (by device), "reference", "cpu" or "triton"; returns the selection.

    "auto" follows OCTAVO_KERNEL_BACKEND if that is set. Raises ValueError for any other name, and
    BackendUnavailableError for a backend that cannot run on this machine.
    """
    global _forced, _selected
    origin = "backend"
    if name == "auto":
        name = os.environ.get(ENV) or "auto"
        origin = ENV
    if name == "auto":
        _forced = None
    elif name in BACKENDS:
        module = _load(name)
        reason = module.unavailable_reason()
        if reason:
            raise BackendUnavailableError(f"{origin}={name!r} cannot run here: {reason}")
        _forced = module
    else:
        raise ValueError(f"{origin}={name!r} is not a kernel backend; choose one of auto, {', '.join(BACKENDS)}")
    _selected = True
    return name


def available_backends() -> list[str]:
    """The backends that can run on this machine."""
    names = []
    for name in BACKENDS:
        try:
            if not _load(name).unavailable_reason():
                names.append(name)
        except BackendUnavailableError:
            pass
    return names


def backend_for(tensor: Tensor) -> ModuleType:
    """The backend module that serves ``tensor``."""
    return _backend_on(tensor.device)


def backend_name(device: torch.device) -> str:
    """The name of the backend that serves tensors on ``device``."""
    return _backend_on(device).__name__.rpartition(".")[2]


def check_device(device: torch.device) -> None:
    """Raises BackendUnavailableError if the selected backend cannot read tensors on ``device``."""
    reason = _backend_on(device).unsupported_device_reason(device)
    if reason:
        raise BackendUnavailableError(f"the kernel backend {backend_name(device)!r} {reason}")


def can_be_captured(device: torch.device) -> bool:
    """True if the kernels for ``device`` read no tensor on the host, so that a CUDA graph can capture them."""
    return _backend_on(device).CAPTURABLE


def attention_problem(
    device: torch.device, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int
) -> str | None:
    """Explain why attention on ``device`` does not support these values, beginning with the name of one; None if it
    does."""
    return _backend_on(device).attention_problem(block_size, dtype, kv_dtype, head_size)


def kv_scale_bytes(device: torch.device, kv_dtype: torch.dtype, head_size: int) -> int:
    """Bytes of the scales of one key or value in a KV cache of ``kv_dtype``, beside its elements."""
    return _backend_on(device).kv_scale_bytes(kv_dtype, head_size) if kv_dtype == torch.int8 else 0


def _backend_on(device: torch.device) -> ModuleType:
    if not _selected:
        select_backend()
    if _forced is not None:
        return _forced
    return _load({"cpu": "cpu", "cuda": "triton"}.get(device.type, "reference"))


@cache
def _load(name: str) -> ModuleType:
    try:
        module = importlib.import_module(f"octavo_kernels.{name}")
    except ImportError as error:  # triton is not installed on every machine
        raise BackendUnavailableError(f"the kernel backend {name!r} cannot be imported: {error}") from error
    if not hasattr(module, "unavailable_reason"):
        raise BackendUnavailableError(f"the kernel backend {name!r} is not part of this installation")
    return module
