"""GPUs by the names that ``--gpu`` takes: their memory, its bandwidth and their arithmetic.

Memory is what PyTorch names in its out-of-memory errors ("has a total capacity of 22.03 GiB"), as users have published
them for most rows. Drivers differ by some tenths of a GiB: the lower common one is here, as a plan should not promise
more than there is. Bandwidth and arithmetic are as NVIDIA states them, and were not measured: dense, of 16-bit numbers
that are summed up in 32 bits, for the SXM variant where there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.memory.ledger import GIB, MIB, DeviceMemory
from octavo.system.suggestions import did_you_mean

# Memory of the driver and a process's context before anything is loaded.
CONTEXT_BYTES = 512 * MIB


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, as its data sheet has it but for the memory."""

    title: str
    gib: float  # of memory, as CUDA reports the total: less than the name says
    bandwidth: float  # GB/s
    tflops: float  # dense, of 16-bit numbers
    fp8: bool = False  # whether it multiplies 8-bit floating-point numbers

    def memory(self) -> DeviceMemory:
        """The memory that an engine finds."""
        where = f"memory of one {self.title}"
        return DeviceMemory("cuda", int(self.gib * GIB), CONTEXT_BYTES, where, has_float8=self.fp8)


GPUS = {
    "l4": GPU("L4", 22.03, 300, 121, True),
    "a10": GPU("A10", 21.96, 600, 125),
    "a10g": GPU("A10G", 21.96, 600, 70),
    "rtx3090": GPU("RTX 3090", 23.56, 936, 71),
    "rtx4090": GPU("RTX 4090", 23.52, 1008, 165, True),
    "rtx5090": GPU("RTX 5090", 31.36, 1792, 209, True),
    "a40": GPU("A40", 44.35, 696, 150),
    "a6000": GPU("RTX A6000", 47.40, 768, 155),
    "l40s": GPU("L40S", 44.39, 864, 362, True),
    "a100-40gb": GPU("A100 40 GB", 39.39, 1555, 312),
    "a100-80gb": GPU("A100 80 GB", 79.14, 2039, 312),
    "h100": GPU("H100 80 GB", 79.10, 3350, 989, True),
    "h200": GPU("H200", 139.72, 4800, 989, True),
    "b200": GPU("B200", 178.35, 8000, 2250, True),
}
LEAST_CAPABILITY = (8, 0)  # as octavo_kernels.triton has it, which imports Triton
_TOO_OLD = {"t4": (7, 5), "v100": (7, 0), "p100": (6, 0), "p4": (6, 1), "p40": (6, 1)}
_OTHER_NAMES = {
    "a100": "a100-80gb",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-141gb": "h200",
    "rtx-4090": "rtx4090",
    "4090": "rtx4090",
    "rtx-3090": "rtx3090",
    "3090": "rtx3090",
    "rtx-5090": "rtx5090",
    "5090": "rtx5090",
    "rtx-a6000": "a6000",
    "a100-40g": "a100-40gb",
    "a100-80g": "a100-80gb",
}


def too_old(name: str, capability: tuple[int, int]) -> ConfigError:
    """Make the error for a GPU that the kernels do not run on."""
    own, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
    return ConfigError(
        f"{name} has compute capability {own}, and the kernels need {least}: take a newer GPU (A10, L4, A100 ...), or "
        "plan for a CPU (--cpu)"
    )


def gpu_of_driver(name: str) -> GPU | None:
    """The one that a driver calls by ``name``, as "NVIDIA A100-SXM4-80GB"; None: not known here."""
    said = re.sub(r"[^a-z0-9]|sxm\d|pcie|gb", "", name.lower())
    found = [known for known in GPUS if re.sub(r"-|gb", "", known) in said]
    return GPUS[max(found, key=len)] if found else None


def find_gpu(name: str) -> GPU:
    """Find a GPU by its name in `GPUS`, a common other one, or that of drivers and nodes' labels. Raises
    ConfigError."""
    asked = name.lower().replace("_", "-").removeprefix("nvidia-")
    known = _OTHER_NAMES.get(asked, asked)
    if known not in GPUS:
        for old, capability in _TOO_OLD.items():
            if old in re.split(r"[^a-z0-9]+", asked):
                raise too_old(name, capability)
        if re.match("nvidia|tesla", name.lower()) and (own := gpu_of_driver(name)) is not None:
            return own
        near = did_you_mean(asked, GPUS) or f"; known are {', '.join(GPUS)}"
        raise ConfigError(f"--gpu: there is no {name!r} among the GPUs that are known{near}; or give its --memory")
    return GPUS[known]
