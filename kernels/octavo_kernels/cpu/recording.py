"""Record a step once, replay it with one call: the CPU's counterpart of a CUDA graph.

A step of a small model is about 300 calls with a few microseconds of arithmetic each, and Python takes as long again. A
recording keeps the packed operations of one step. Replaying runs them as one program, without Python and without
starting the threads for each operation. The rules are those of CUDA graphs: inputs are read and outputs written where
they lay when the step was recorded, and only operations of this package may be part of a step, which is checked. Unlike
a CUDA graph, a program can also run smaller steps than the recorded one, and recording computes nothing.
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

from octavo_kernels.cpu.library import ADDRESSES, KEPT, NAMES, ROWS, SEQUENCES, Library, get_library

T = TypeVar("T")

# Operations that allocate a tensor. Apart from these, a recorded step may use views of tensors only.
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


class RecordingError(RuntimeError):
    """The step cannot be recorded; the message names the operation that prevents it."""


class Program(Generic[T]):
    """A recorded step. ``outputs`` is what it returned; every `replay` fills those tensors."""

    def __init__(self, library: Library, words: np.ndarray, outputs: T, memory: tuple[Tensor, ...]) -> None:
        """``words`` int64: the packed operations. ``memory``: tensors that must live as long as the program."""
        self._library, self._words, self._memory = library, words, memory
        self._address, self._length = words.ctypes.data, len(words)  # without those that follow once
        indices, self._sequences = _argument_indices(words, ROWS), _argument_indices(words, SEQUENCES)
        row_counts = words[indices]
        self._rows = [indices[row_counts == row_count] for row_count in dict.fromkeys(row_counts.tolist())]
        self.outputs = outputs

    def replay(self, *rows: int, sequences: int | None = None, threads: int | None = None, then: bytes = b"") -> None:
        """Run the step on what its inputs hold now, and ``then`` these packed operations. The tensors it was recorded
        with must still be alive.

        ``rows`` and ``sequences`` limit the step to so many of those that were recorded; without them the numbers of
        the last replay hold. If operations of the step have different numbers of rows, give one number for each, in the
        order of their first operations. Raises ValueError for more or fewer.
        """
        if rows:
            if len(rows) != len(self._rows):
                raise ValueError(
                    f"rows: {len(rows)} numbers of rows given, the step was recorded with {len(self._rows)}"
                )
            for indices, count in zip(self._rows, rows, strict=True):
                self._words[indices] = count
        if sequences is not None:
            self._words[self._sequences] = sequences
        end = self._length
        if then:
            more = np.frombuffer(then, dtype=np.int64)
            end += len(more)
            if end > len(self._words):
                self._words = np.concatenate((self._words[: self._length], more))
                self._address = self._words.ctypes.data
            self._words[self._length : end] = more
        self._library.run_at(self._address, end, threads)

    @property
    def kinds(self) -> list[str]:
        """The names of all operations, in their order."""
        return [NAMES[int(self._words[at])] for at, _ in _operations(self._words[: self._length])]

    def by_kind(self, label: Callable[[str, int], str] = lambda kind, number: kind) -> dict[str, Program[None]]:
        """The operations of each kind as a program of its own, for profiling. Their results are meaningless.

        ``label`` names the part of an operation, given its kind and the number of earlier operations of that kind.
        """
        kinds: dict[str, list[np.ndarray]] = {}
        seen: Counter[str] = Counter()
        for at, end in _operations(self._words[: self._length]):
            name = NAMES[int(self._words[at])]
            kinds.setdefault(label(name, seen[name]), []).append(self._words[at:end])
            seen[name] += 1
        return {
            name: Program(self._library, np.concatenate(parts), None, self._memory) for name, parts in kinds.items()
        }


def _operations(words: np.ndarray) -> list[tuple[int, int]]:
    """The first word of each operation, and the word after its last."""
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
    """Memory that several programs share, for intermediate tensors and outputs: replaying one overwrites the others'
    outputs.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """At least ``size`` bytes, uint8. Programs keep smaller buffers they were given; doubling bounds their sum."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, 2 * self._buffer.numel()), dtype=torch.uint8)
        return self._buffer


def record(step: Callable[[], T], arena: Arena | None = None) -> Program[T]:
    """Record ``step``, which returns a tensor, or a tuple or list of tensors. Nothing is computed before a `replay`.

    Tensors that ``step`` reads must not move. Record it with the largest number of rows and sequences: memory that
    smaller steps do not touch costs nothing. With an ``arena``, the outputs lie in it. Raises RecordingError if the
    step uses operations of other packages, or if the C kernels are unavailable.
    """
    library = get_library()
    if library is None:
        raise RecordingError("the CPU kernels are unavailable: see octavo_kernels.cpu.unavailable_reason()")
    if library.recorder is not None:
        raise RecordingError("another step is being recorded already")
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
    """Return True if an operation with this schema may return views of its arguments and cannot change them.

    It may still copy: `to`, `contiguous` and `reshape` return a view or a copy, depending on the argument.
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
    """Place the step's intermediate tensors in one buffer, where those that are not live at the same time share bytes;
    with an ``arena``, place the outputs there too. Changes the addresses in ``words``.

    Returns the memory to keep and the moved outputs. A step then touches a few hundred kilobytes that stay in the
    processor's cache instead of many megabytes.
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
    # Read after the program's end, or by a thread that comes late to an operation whose items others have done
    lasting = results | set(words[_argument_indices(words, KEPT)].tolist())
    for index, buffer in enumerate(intermediates):
        if buffer.untyped_storage().data_ptr() in lasting:
            last[index] = len(operations)
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
