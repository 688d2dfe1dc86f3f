"""A Hopper GPU that computes nothing: real code runs on it, and what it would be asked to do is noted and checked.

Tensors on it are torch's fake ones, with a shape and a device and no memory; Triton's kernels pass its front end for
sm_90 and are not run (tests/kernels/triton/test_compile_ahead.py makes machine code of them). Tokens that come back are
all 0. What a CPU cannot show becomes an error here: tensors of both sides in one operation; in a captured step a copy
between the two; the replay of a step whose inputs have been given back; while `strict`, anything for which the host
would wait: a value that is read back, a copy from or to memory that is not pinned.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.loader import load_model
from octavo.loader.dummy import DummyWeight
from octavo.worker import lora

TARGET = GPUTarget("cuda", 90, 32)
MEMORY = 80 << 30
SMS = 132
ALLOCATION = 512  # bytes that an address is a multiple of, as torch's allocator has it

# Made of what is there: no kernel is launched for them.
VIEWS = {
    *("view", "_unsafe_view", "alias", "slice", "select", "unbind", "detach", "t", "transpose", "permute", "expand"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "as_strided", "_reshape_alias", "diagonal", "unfold"),
    *("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "lift_fresh", "resize_", "set_"),
}


class HostWaitError(AssertionError):
    """The host and the device would wait for each other."""


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: Triton's with what it was compiled for, or an operation of torch's."""

    name: str
    grid: tuple[int, ...] = ()
    variant: str = ""  # of Triton's: the hash of what was compiled
    rows: tuple[int, ...] = ()  # of torch's: the result's shape


@dataclass
class Graph:
    """A captured step."""

    launches: list[Launch] = field(default_factory=list)
    replays: int = 0
    made: set[int] = field(default_factory=set)  # storages that its own memory pool holds
    reads: dict[int, str] = field(default_factory=dict)  # other storages, by who reads or writes them
    lost: list[str] = field(default_factory=list)  # who would read memory that has been given back


class PretendedGpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.launches: list[Launch] = []  # since the last `take_launches`, captured ones excepted
        self.graphs: list[Graph] = []
        self.kernels: dict[str, Any] = {}  # hash -> what Triton compiled
        self._capturing: Graph | None = None
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._pinned: set[int] = set()  # addresses of the host's memory
        self._addresses: dict[int, int] = {}
        self._next_address = 1 << 40
        self.allocated = self.peak = 0  # bytes
        self._pool = 0  # what graphs keep beside their results, one after the other in the same memory

    def take_launches(self) -> list[Launch]:
        found, self.launches = self.launches, []
        return found

    # -- what torch is asked for -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901 (a branch for each kind of operation)
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # what a tensor is
            with self._fake:
                return func(*args, **kwargs)
        if func._can_decompose():  # in inference mode operations come here before torch has taken them apart
            with self:
                return func.decompose(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        pin = kwargs.pop("pin_memory", None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        there = [t for t in tensors if isinstance(t, FakeTensor)]
        here = [t for t in tensors if not isinstance(t, FakeTensor) and t.ndim]
        if not there and (device is None or torch.device(device).type == "cpu"):
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            if pin:
                self._note_pinned(out)
            return out
        if name == "_local_scalar_dense":
            return self._read_back(name)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            self._crosses(name, args[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
            with unset_fake_temporarily():
                return args[0].zero_()
        to_host = device is not None and torch.device(device).type == "cpu"
        if to_host:
            self._crosses(name, None, False)
            with unset_fake_temporarily():
                return torch.zeros(there[0].shape, dtype=kwargs.get("dtype") or there[0].dtype)
        if here:
            if name not in ("copy_", "_to_copy"):
                raise AssertionError(f"{name}: tensors of the host and of the device in one operation")
            self._crosses(name, here[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        with self._fake:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._account(tensor)
        self._note_reads(name, there)
        if name not in VIEWS:
            first = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
            self._launched(Launch(name, rows=tuple(first.shape) if first is not None else ()))
        return out

    def _read_back(self, name: str) -> int:
        if self.strict or self._capturing:
            raise HostWaitError(f"{name}: a value is read back from the device")
        return 0

    def _crosses(self, name: str, host: Tensor | None, non_blocking: bool) -> None:
        if self._capturing:
            raise HostWaitError(f"{name}: a copy between host and device in a captured step")
        pinned = host is not None and host.untyped_storage().data_ptr() in self._pinned
        if self.strict and not (pinned and non_blocking):
            raise HostWaitError(f"{name}: a copy for which the host waits: not pinned, or not told not to")

    def _account(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._addresses:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self._addresses[storage._cdata] = self._next_address
        if self._capturing:
            self._capturing.made.add(storage._cdata)
        self._next_address += size
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._addresses.pop(key, None)
        self.allocated -= size
        for graph in [*self.graphs, *([self._capturing] if self._capturing else [])]:
            if key in graph.reads:
                graph.lost.append(graph.reads.pop(key))
            graph.made.discard(key)

    def _note_reads(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Note what a captured step finds and does not make itself: a graph keeps addresses, not tensors."""
        if graph := self._capturing:
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key not in graph.made:
                    graph.reads.setdefault(key, name)

    def address(self, tensor: Tensor) -> int:
        base = self._addresses.get(tensor.untyped_storage()._cdata, 0)
        return base + tensor.storage_offset() * tensor.element_size()

    def _launched(self, launch: Launch) -> None:
        (self._capturing.launches if self._capturing else self.launches).append(launch)

    # -- what Triton and torch.cuda are asked for --------------------------------------------------------------------

    @contextlib.contextmanager
    def pretend(self) -> Iterator[PretendedGpu]:
        """Within, torch and Triton believe in this device."""
        patch = mock.patch.object
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch(JITFunction, "run", self._compile_instead_of(JITFunction.run)))
            stack.enter_context(patch(FakeTensor, "data_ptr", lambda tensor: self.address(tensor), create=True))
            stack.enter_context(patch(Tensor, "pin_memory", lambda tensor: self._pin(tensor)))
            stack.enter_context(patch(driver, "_active", _Hopper()))
            stack.enter_context(patch(knobs.runtime, "add_stages_inspection_hook", _without_machine_code))
            # Other threads know nothing of this mode: files are read by this one, dummy weights by none.
            stack.enter_context(patch(load_model, "ThreadPoolExecutor", _ThisThread))
            stack.enter_context(patch(lora, "ThreadPoolExecutor", _ThisThread))
            stack.enter_context(patch(DummyWeight, "load_into", lambda weight, target: None))
            for name, stand_in in self._cuda().items():
                stack.enter_context(patch(torch.cuda, name, stand_in, create=True))
            stack.enter_context(self._fake)
            stack.enter_context(self)
            yield self

    def _compile_instead_of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            for name, value in zip(kernel.arg_names, args, strict=False):
                for part in value if isinstance(value, tuple) else (value,):
                    if isinstance(part, Tensor) and not isinstance(part, FakeTensor):
                        raise AssertionError(f"{kernel.__name__}: {name} is a tensor of the host")
                    if isinstance(part, FakeTensor):
                        self._note_reads(f"{kernel.__name__}: {name}", [part])
            compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            self.kernels[compiled.hash] = compiled
            self._launched(Launch(kernel.__name__, tuple(grid), compiled.hash))

        return compile_instead

    def _pin(self, tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            copy = tensor.clone()
            self._note_pinned(copy)
        return copy

    def _note_pinned(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned.add(storage.data_ptr())
        weakref.finalize(storage, self._pinned.discard, storage.data_ptr())

    def _cuda(self) -> dict[str, Any]:
        stream = SimpleNamespace(
            wait_stream=lambda other: None, wait_event=lambda event: None, synchronize=lambda: None
        )

        @contextlib.contextmanager
        def use(stream: Any) -> Iterator[None]:
            yield

        def reset_peak(device: Any = None) -> None:
            self.peak = self.allocated

        properties = SimpleNamespace(
            multi_processor_count=SMS, total_memory=MEMORY, shared_memory_per_block_optin=227 << 10
        )
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "mem_get_info": lambda device=None: (MEMORY - self.allocated, MEMORY),
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": reset_peak,
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
            "current_stream": lambda device=None: stream,
            "stream": use,
            "graph_pool_handle": lambda: (0, 0),
            # Classes, as annotations of libraries that are imported meanwhile combine them with others.
            "Stream": _class_of("Stream", lambda: stream),
            "Event": _class_of(
                "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True, synchronize=lambda: None)
            ),
            "CUDAGraph": _class_of("CUDAGraph", lambda: _Graph(self)),
        }


def _without_machine_code(
    backend: Any = None, stages: dict[str, Any] | None = None, options: Any = None, *about: Any
) -> tuple[str, str] | None:
    """End Triton's stages behind its front end: the others, to machine code, take three quarters of a case's time.

    Triton calls it with a backend's stages, and without arguments for what tells such a kernel from a whole one in its
    caches.
    """
    if stages is None:
        return ("without machine code",) * 2

    def named(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name=module.get_entry_func_name(), shared=0)
        return b""

    del stages["ttgir"], stages["llir"], stages["ptx"]
    stages["cubin"] = named
    return None


def _class_of(name: str, make: Callable[[], Any]) -> type:
    """A class of which an instance is whatever ``make`` returns."""
    return type(name, (), {"__new__": lambda cls, **options: make()})


class _Fake(FakeTensorMode):
    avoid_device_init = True  # also while torch.cuda says that there is one


class _Graph:
    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu, self._graph = gpu, Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = self._gpu
        gpu._capturing = self._graph
        self._peak, gpu.peak = gpu.peak, gpu.allocated

    def capture_end(self) -> None:
        gpu = self._gpu
        gpu._capturing = None
        gpu.graphs.append(self._graph)
        inside = gpu.peak - gpu.allocated
        gpu.peak = max(self._peak, gpu.peak)
        gpu.allocated += max(0, inside - gpu._pool)
        gpu._pool = max(gpu._pool, inside)

    def replay(self) -> None:
        if self._graph.lost:
            raise AssertionError(f"a replay reads memory that was given back: {', '.join(self._graph.lost)}")
        self._graph.replays += 1
        self._gpu._launched(Launch("replay", (len(self._graph.launches),)))


class _ThisThread(Executor):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **kwargs))
        return done


class _Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def what_is_noticed(gpu: PretendedGpu) -> dict[str, Any]:
    """Whether the checks see what they are for: each of these must be refused."""
    there, here = torch.ones(4, device="cuda"), torch.arange(4)
    pinned = here.pin_memory()
    graph = torch.cuda.CUDAGraph()

    def reads_what_is_gone() -> None:
        gone = [torch.ones(4, device="cuda")]
        captured(lambda: gone[0] * 2)()
        gone.clear()
        graph.replay()

    def captured(work: Callable[[], object]) -> Callable[[], object]:
        def capture() -> None:
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()

        return capture

    wrong: dict[str, Callable[[], object]] = {
        "a value read back": lambda: there.sum().item(),
        "a branch": lambda: bool(there[0] > 0),
        "a list": lambda: there.tolist(),
        "an unknown size": lambda: there.nonzero(),
        "a copy to the host": lambda: there.cpu(),
        "a copy from memory that is not pinned": lambda: here.to("cuda", non_blocking=True),
        "a copy that is waited for": lambda: pinned.to("cuda"),
        "a host's index": lambda: there[here],
        "a replay that reads what is gone": reads_what_is_gone,
        "a captured copy": captured(lambda: pinned.to("cuda", non_blocking=True)),
    }
    right: dict[str, Callable[[], object]] = {
        "a pinned copy": lambda: pinned.to("cuda", non_blocking=True),
        "a pinned copy back": lambda: pinned.copy_(there, non_blocking=True),
        "captured work": captured(lambda: there * 2),
    }
    gpu.strict = True
    return {
        "refused": [name for name in wrong if refused(wrong[name])],
        "wrong": list(wrong),
        "refused wrongly": [name for name in right if refused(right[name])],
    }


def refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except (HostWaitError, AssertionError, torch._subclasses.fake_tensor.DynamicOutputShapeException):
        return True
    return False
