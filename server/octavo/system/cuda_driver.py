"""The GPU of this machine as its driver tells of it, without torch and without a context on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CLOCK_KHZ, _BUS_BITS = 36, 37  # attributes of a device's memory
_MAJOR, _MINOR = 75, 76  # of its compute capability
_MEMORY_V2 = 2 << 24  # of NVML's structure: the size is added


@dataclass(frozen=True)
class FoundGPU:
    """``total`` and ``used`` in bytes; ``bandwidth`` in GB/s, 0 where the driver does not say."""

    name: str
    total: int  # as CUDA reports it
    used: int  # by other processes, and what the driver keeps for them
    bandwidth: float
    capability: tuple[int, int]
    cuda: tuple[int, int]  # the newest that the driver runs


class _Memory(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


def gpu_here(load: Callable[[str], Any] = ctypes.CDLL) -> FoundGPU | None:
    """The first that CUDA would use (CUDA_VISIBLE_DEVICES counts); None: there is none, or no driver. ``load`` opens a
    shared library."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return None
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) or cuda.cuDeviceGetName(name, 256, device):
        return None
    clock, bits = (_attribute(cuda, device, number) for number in (_CLOCK_KHZ, _BUS_BITS))
    bus = ctypes.create_string_buffer(32)
    used = 0 if cuda.cuDeviceGetPCIBusId(bus, 32, device) else _used(load, bus)
    capability = _attribute(cuda, device, _MAJOR), _attribute(cuda, device, _MINOR)
    bandwidth = 2 * clock * 1e3 * bits / 8 / 1e9
    version = ctypes.c_int()
    number = 0 if cuda.cuDriverGetVersion(ctypes.byref(version)) else version.value  # 12080: 12.8
    newest = number // 1000, number % 1000 // 10
    return FoundGPU(name.value.decode(errors="replace"), size.value, used, bandwidth, capability, newest)


def _attribute(cuda: Any, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value


def _used(load: Callable[[str], Any], bus: Any) -> int:
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return 0
    handle, memory = ctypes.c_void_p(), _Memory(version=ctypes.sizeof(_Memory) | _MEMORY_V2)
    if nvml.nvmlInit_v2():
        return 0
    try:
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
            return 0
        return 0 if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) else memory.used
    finally:
        nvml.nvmlShutdown()
