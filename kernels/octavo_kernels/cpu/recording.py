"""Record a step once, replay it with one call: the CPU's counterpart of a CUDA graph.

A step of a small model is some 300 calls of a few microseconds of arithmetic each, and Python costs as much again. A
recording keeps the packed operations of one step; replaying hands them to the threads as one program, without Python
and without starting the threads anew for each. The rules are those of CUDA graphs: inputs are read and outputs written
where they lay when the step was recorded, and only operations of this package may be part of it, which is checked.
Unlike a CUDA graph a program also does smaller steps than the one that was recorded, and recording computes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo_kernels.cpu.library import ADDRESSES, NAMES, ROWS, SEQUENCES, Library, get_library

T = TypeVar("T")

# How torch makes room. Beside that it may only look at tensors in another shape in a recorded step.
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


class RecordingError(RuntimeError):
    """The step cannot be recorded; the message names the operation that stands in the way."""


class Program(Generic[T]):
    """A recorded step. ``outputs`` is what it returned; every `replay` fills those tensors."""

    def __init__(self, library: Library, words: np.ndarray, outputs: T, memory: tuple[Tensor, ...]) -> None:
        """``words`` int64: the packed operations. ``memory``: what must live as long as the program."""
        self._library, self._words, self._memory = library, words, memory
        self._address = words.ctypes.data
        indices, self._sequences = _argument_indices(words, ROWS), _argument_indices(words, SEQUENCES)
        row_counts = words[indices]
        self._rows = [indices[row_counts == row_count] for row_count in dict.fromkeys(row_counts.tolist())]
        self.outputs = outputs

    def replay(self, *rows: int, sequences: int | None = None, threads: int | None = None) -> None:
        """Run the step on what its inputs hold now. The tensors it was recorded with must still be alive.

        ``rows``, ``sequences``: only that many of those that it was recorded with; none: as many as the last time.
        Where the step's operations differ in their number of rows, one of ``rows`` for each number that it was recorded
        with, in the order in which those came. Raises ValueError for more or fewer.
        """
        if rows:
            if len(rows) != len(self._rows):
                raise ValueError(f"rows: {len(rows)} given, the step's operations have {len(self._rows)} row_counts")
            for indices, count in zip(self._rows, rows, strict=True):
                self._words[indices] = count
        if sequences is not None:
            self._words[self._sequences] = sequences
        self._library.run_at(self._address, len(self._words), threads)

    def by_kind(self, label: Callable[[str, int], str] = lambda kind, number: kind) -> dict[str, Program[None]]:
        """The operations of each kind as a program of its own, to see where the time goes. Results are meaningless.

        ``label`` may tell apart what is of one kind: it is given the kind and how many of it came before.
        """
        kinds: dict[str, list[np.ndarray]] = {}
        seen: Counter[str] = Counter()
        for at, end in _operations(self._words):
            name = NAMES[int(self._words[at])]
            kinds.setdefault(label(name, seen[name]), []).append(self._words[at:end])
            seen[name] += 1
        return {
            name: Program(self._library, np.concatenate(parts), None, self._memory) for name, parts in kinds.items()
        }


def _operations(words: np.ndarray) -> list[tuple[int, int]]:
    """Where each operation begins and ends."""
    found, at = [], 0
    while at < len(words):
        found.append((at, at := at + 2 + int(words[at + 1])))
    return found


def _argument_indices(words: np.ndarray, arguments: dict[int, list[int]]) -> np.ndarray:
    """int64 indices of the given arguments of all operations."""
    return np.array(
        [at + 2 + argument for at, _ in _operations(words) for argument in arguments[int(words[at])]], dtype=np.int64
    )


class Arena:
    """Memory that several programs use in turn, for intermediate tensors and outputs alike: what one returned is
    overwritten when another one is replayed.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8, at least ``size`` long. Programs that were given a smaller one keep it: doubling bounds their sum."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, 2 * self._buffer.numel()), dtype=torch.uint8)
        return self._buffer


def record(step: Callable[[], T], arena: Arena | None = None) -> Program[T]:
    """Record ``step``, which returns a tensor, or a tuple or list of tensors. Nothing is computed before a `replay`.

    Tensors that ``step`` reads must stay where they are. It is recorded with as many rows and sequences as there may
    ever be: memory that smaller steps do not touch costs nothing. With an ``arena``, the outputs lie in it.
    Raises RecordingError when the step uses operations that are not this package's, or the C kernels are not there.
    """
    library = get_library()
    if library is None:
        raise RecordingError("the CPU kernels are not there: see octavo_kernels.cpu.unavailable_reason()")
    if library.recorder is not None:
        raise RecordingError("a step is being recorded already")
    mode = _RecordingMode()
    library.recorder = []
    try:
        with mode:
            result = step()
        operations = library.recorder
    finally:
        library.recorder = None
    words = np.frombuffer(b"".join(operations), dtype=np.int64).copy()
    outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
    memory, moved = _plan_memory(words, mode.buffers, outputs, arena)
    return Program(library, words, moved[0] if isinstance(result, Tensor) else moved, (*memory, *moved))  # type: ignore[arg-type]


class _RecordingMode(TorchDispatchMode):
    """Keeps every tensor that the step allocates, and refuses all other operations of torch: while a step is recorded,
    its tensors do not hold their values yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing compiles these steps, and to skip the compiler torch would first import it, which takes more
        than a second in the middle of the first step."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in _ALLOCATIONS:
            result = func(*args, **kwargs)
            self.buffers.append(result)
            return result
        if _may_be_view(func._schema):
            result = func(*args, **kwargs)
            if _storages(result) <= _storages((args, kwargs)):
                return result
        raise RecordingError(f"the step uses torch's own {name}: it cannot be recorded")


def _may_be_view(schema: Any) -> bool:
    """Whether the schema lets an operation return its arguments in another shape, and keeps it from changing them.

    It may copy all the same: `to`, `contiguous` and `reshape` return a view or a copy, as the argument demands.
    """
    returns = [returned.alias_info for returned in schema.returns]
    return bool(returns) and not schema.is_mutable and all(info is not None for info in returns)


def _storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors in (nested) arguments or results."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _plan_memory(
    words: np.ndarray, buffers: list[Tensor], outputs: list[Tensor], arena: Arena | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Move the step's intermediate tensors into one piece of memory, where those share bytes that are not needed at the
    same time; into a given ``arena`` move the outputs too. Changes the addresses in ``words``.

    Returns the memory to keep, and where the outputs are then: a step touches a few hundred kilobytes that stay in the
    cache instead of many megabytes.
    """
    results = {t.untyped_storage().data_ptr() for t in outputs}
    intermediates = sorted(
        (b for b in buffers if b.numel() and (arena or b.untyped_storage().data_ptr() not in results)),
        key=Tensor.data_ptr,
    )
    starts = [b.data_ptr() for b in intermediates]
    sizes = [b.untyped_storage().nbytes() for b in intermediates]
    uses: list[tuple[int, int]] = []  # (word of the program, buffer)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    operations = _operations(words)
    values = words.tolist()
    for operation, (at, _) in enumerate(operations):
        for argument in ADDRESSES[values[at]]:
            address = values[at + 2 + argument]
            index = bisect_right(starts, address) - 1
            if index >= 0 and address < starts[index] + sizes[index]:
                uses.append((at + 2 + argument, index))
                first.setdefault(index, operation)
                last[index] = operation
    for index, buffer in enumerate(intermediates):
        if buffer.untyped_storage().data_ptr() in results:
            last[index] = len(operations)  # read after the program's end
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # (offset, end, last operation), by offset
    size = 0
    for index in sorted(first, key=lambda i: first[i]):
        live = [item for item in live if item[2] >= first[index]]
        need = -(-sizes[index] // 64) * 64
        offset = 0
        for start, end, _ in live:
            if offset + need <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        live = sorted([*live, (offset, offset + need, last[index])])
        size = max(size, offset + need)
    memory = (arena or Arena()).take(size + 64)
    base = -(-memory.data_ptr() // 64) * 64
    for word, index in uses:
        words[word] += base + offsets[index] - starts[index]
    moved = []
    for output in outputs:
        index = bisect_right(starts, output.data_ptr()) - 1
        if index in offsets and output.untyped_storage().data_ptr() == starts[index]:
            at = base + offsets[index] - memory.data_ptr()
            whole = memory[at : at + sizes[index]].view(output.dtype)
            first_element = whole.storage_offset() + output.storage_offset()
            output = whole.as_strided(output.shape, output.stride(), first_element)
        moved.append(output)
    return [memory], moved
