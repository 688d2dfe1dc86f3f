"""The device that is planned for: one by name, so much memory, or what this machine has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.memory.ledger import DeviceMemory, gib, this_machine
from octavo.plan.formats import fast_formats
from octavo.plan.gpus import CONTEXT_BYTES, LEAST_CAPABILITY, find_gpu, gpu_of_driver, too_old
from octavo.plan.speed import Speed
from octavo.system import limits
from octavo.system.cuda_driver import gpu_here

_LEAST = 64 << 20  # less is a number whose unit was forgotten


@dataclass(frozen=True)
class PlannedDevice:
    """``host``: the machine that its GPU is in; ``speed``: by its data sheet, None: not known; ``formats``: which are
    the fastest on it, in words; None for a GPU and for a CPU that may be another."""

    memory: DeviceMemory
    name: str  # that calibrations are kept by
    speed: Speed | None
    host: DeviceMemory | None = None
    formats: str | None = None


def planned_device(gpu: str | None, memory: int | None, cpu: bool, device: str) -> PlannedDevice:
    """``gpu``: its name; ``memory``: bytes; ``cpu``: this machine without its GPU; ``device``: as --device says it.
    Raises ConfigError."""
    if memory is not None and memory < _LEAST:
        raise ConfigError(f"--memory must be at least {_LEAST >> 20} MiB, got {memory} bytes; give a unit, as 24GiB")
    if gpu is not None and (cpu or device == "cpu"):
        raise ConfigError("--cpu and --gpu are two devices: give one")
    if cpu and device == "cuda":
        raise ConfigError("--cpu and --device cuda are two devices: give one")
    if gpu is not None:
        known = find_gpu(gpu)
        found = known.memory()
        return PlannedDevice(replace(found, total=memory or found.total), known.title, Speed.of_gpu(known))
    if not cpu and device != "cpu" and (memory is None or device == "cuda"):
        own = _own_gpu(memory)
        if own is not None:
            return own
        if device == "cuda":
            raise ConfigError("--device cuda: no driver tells of a GPU in this machine; name one with --gpu")
    cores = limits.cpu_count()
    name, speed = f"CPU, {cores} cores", Speed.of_cpu(cores)
    if memory is not None:
        return PlannedDevice(DeviceMemory("cpu", memory, where=f"memory of a machine with {gib(memory)}"), name, speed)
    return PlannedDevice(this_machine(), name, speed, formats=fast_formats())


def _own_gpu(memory: int | None) -> PlannedDevice | None:
    found = gpu_here()
    if found is None:
        return None
    if found.capability < LEAST_CAPABILITY:
        raise too_old(f"this machine's {found.name}", found.capability)
    known = gpu_of_driver(found.name)
    speed = None
    if known is not None:
        speed = Speed.of_gpu(replace(known, bandwidth=found.bandwidth or known.bandwidth))
    where = f"memory of this machine's {found.name}"
    device = DeviceMemory(
        "cuda", memory or found.total, found.used + CONTEXT_BYTES, where, has_float8=found.capability >= (8, 9)
    )
    return PlannedDevice(device, known.title if known else found.name, speed, this_machine())
