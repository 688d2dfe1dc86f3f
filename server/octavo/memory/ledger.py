"""The memory ledger: the parts into which a device's memory is divided, and the lines that show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.interface.engine_config import CacheConfig, ModelConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.quantizations import PER_CHANNEL, PER_GROUP
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.interface.state_spec import StateSpec
from octavo.memory.states import state_line
from octavo.system import limits

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    kind: str  # cpu | cuda
    total: int  # of a CPU: that this process may use
    in_use: int = 0  # of it, by the driver and other processes, before anything is loaded
    where: str = "memory of the device"
    overlap: bool = False  # of steps, on a CPU too
    has_matrix_units: bool = False  # of a CPU whose kernels multiply by them
    has_float8: bool = True  # a GPU that knows numbers of 8 bits: compute capability 8.9 and above
    communication: int = 0  # of a GPU: by which it exchanges tensors with others, beside what is in use

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be under way at the same time."""
        return 1 if self.kind == "cpu" and not self.overlap else 2


def this_machine() -> DeviceMemory:
    """The memory of this machine's CPUs, as far as this process may use it."""
    where = "memory that this process may use"
    return DeviceMemory("cpu", limits.memory_limit(), where=where, has_matrix_units=limits.has_matrix_units())


@dataclass(frozen=True)
class MemoryLedger:
    """The division of memory at start, in bytes. ``num_blocks`` counts the null block."""

    total: int  # that the engine may use
    weights: int
    kv_cache: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    layout: KVCacheLayout
    parts: tuple[tuple[str, int], ...] = ()  # what else is reserved: (name, bytes)
    prefix_cache_blocks: int | None = None  # see `octavo.core.block_pool.BlockPool`
    drafter: int = 0  # of the weights: those of the model that guesses tokens

    def limits(self) -> tuple[int, int, int]:
        """The limits that ranks agree on, for `cut_to`."""
        most = self.prefix_cache_blocks
        return self.num_blocks, self.max_model_len, self.num_blocks if most is None else most

    def cut_to(self, num_blocks: int, max_model_len: int, prefix_cache_blocks: int) -> MemoryLedger:
        """The ledger cut to a KV cache of so many blocks, for which other ranks have room too."""
        kv_cache, most = self.kv_cache - (self.num_blocks - num_blocks) * self.block_bytes, self.prefix_cache_blocks
        return replace(
            self,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            kv_cache=kv_cache,
            prefix_cache_blocks=None if most is None else min(prefix_cache_blocks, num_blocks - 1),
        )

    def shares(self) -> dict[str, int]:
        """``total``, in bytes, by what it is for; "unused" is what the rest leaves."""
        drafter = {"drafter": self.drafter} if self.drafter else {}
        weights = self.weights - self.drafter
        shares = {"weights": weights, **drafter, **dict(self.parts), "KV cache": self.kv_cache}
        return {**shares, "unused": max(0, self.total - sum(shares.values()))}

    def lines(self, weights_by_kind: Mapping[str, int]) -> list[str]:
        """One log line for each part. ``weights_by_kind``: bytes, as `CausalLM.weight_bytes_by_kind` gives them."""
        size, usable = self.layout.block_size, self.num_blocks - 1
        tokens = usable * (-(-self.max_model_len // size) * size) // self.layout.most_blocks(self.max_model_len)
        kinds = ", ".join(f"{kind} {size / MIB:,.1f}" for kind, size in weights_by_kind.items())
        lines = [
            f"{'memory limit':14} {self.total / MIB:10,.0f} MiB",
            f"{'weights':14} {(self.weights - self.drafter) / MIB:10,.0f} MiB  {kinds}",
            *(f"{name:14} {size / MIB:10,.0f} MiB" for name, size in self.parts),
        ]
        if self.drafter:
            lines.insert(2, f"{'drafter':14} {self.drafter / MIB:10,.0f} MiB  its keys and values are in the KV cache")
        if not self.kv_cache:
            return lines
        lines.append(
            f"{'KV cache':14} {self.kv_cache / MIB:10,.0f} MiB  {usable:,} blocks of {size} "
            f"tokens, {tokens:,} tokens: {tokens / self.max_model_len:.1f} sequences of {self.max_model_len:,}"
        )
        lines += state_line(self.layout)
        if any(group.window for group in self.layout.groups):
            lines.append(f"{'a block':14} {self.block_bytes / MIB:10,.2f} MiB  {self._groups()}")
        if self.prefix_cache_blocks is not None:
            most = self.prefix_cache_blocks * self.block_bytes
            lines.append(
                f"{'prefix cache':14} {most / MIB:10,.0f} MiB  of the KV cache, at most: prefixes of requests that "
                "have ended"
            )
        return lines

    def _groups(self) -> str:
        """Describe which layers keep what, and how much of a block they leave empty."""
        groups = self.layout.groups
        layers: Counter[int | None] = Counter()
        for group in groups:
            layers[group.window] += len(group.layers)
        kinds = [
            f"{count} {'keep every position' if window is None else f'a window of {window:,}'}"
            for window, count in layers.items()
        ]
        most = max(len(group.layers) for group in groups)
        return f"of up to {most} layers, of which {', '.join(kinds)}; {self.layout.padding:.1%} padding"

    def shortened(self, own_len: int, cache: CacheConfig) -> str | None:
        """One line for the log where ``max_model_len`` is below the model's ``own_len``: why, and what would help."""
        if self.max_model_len >= own_len:
            return None
        needed = self.layout.most_blocks(own_len) + 1
        if cache.num_gpu_blocks_override is not None:
            flag = f"--num-gpu-blocks-override {needed - 1}"
        elif cache.kv_cache_memory_bytes is not None:
            flag = f"--kv-cache-memory-bytes {needed * self.block_bytes}"
        else:
            flag = f"more memory, --gpu-memory-utilization above {cache.gpu_memory_utilization:g} or a smaller "
            flag += "--kv-cache-dtype"
        return (
            f"max_model_len is {self.max_model_len:,}, not the model's {own_len:,}: the KV cache of "
            f"{gib(self.kv_cache)} holds no longer sequence, {own_len:,} tokens need {gib(needed * self.block_bytes)}; "
            f"longer ones take {flag}"
        )


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model on one device before it can serve anything."""

    model: str
    weights: int  # bytes
    parameters: int  # their number
    weight_dtype: str  # as they lie in memory: "bfloat16", "int8", "gguf" (in the file's own codes)
    specs: list[KVCacheSpec]  # of the layers' KV cache
    drafter: int = 0  # of the bytes: those of the model that guesses tokens
    stage: Stage = ONE_STAGE  # of a pipeline
    num_layers: int = 0  # of that stage
    state: StateSpec | None = None  # of recurrent layers

    def with_drafter(self, drafter: ModelMemory) -> ModelMemory:
        """The memory with a drafter beside the model, whose layers come after its own."""
        return replace(
            self, weights=self.weights + drafter.weights, specs=[*self.specs, *drafter.specs], drafter=drafter.weights
        )


def held_in(model: ModelConfig, in_codes: bool) -> str:
    """The ``weight_dtype`` where config.json describes no quantised format. ``in_codes``: not all are floats."""
    if not in_codes:
        return model.weight_dtype or model.dtype
    if model.files.format == "gguf" and model.quantization in (None, "gguf"):
        return "gguf"
    return "int8" if model.quantization in (None, PER_CHANNEL, PER_GROUP) else model.quantization


def gib(size: int) -> str:
    """Bytes in GiB: "131.4 GiB", "0.25 GiB", or in MiB: "60 MiB"."""
    if size < GIB / 10:
        return f"{size / MIB:,.0f} MiB"
    return f"{size / GIB:,.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"
