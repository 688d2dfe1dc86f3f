"""CUDA graphs: work that is launched again and again on the same tensors, captured once and replayed with one call.

A capture reads its inputs and leaves its results in the memory of its first run. Captures of one `Capture` share memory
for intermediate tensors, so they must be replayed one after the other, which a stream does. Intermediate tensors of
an earlier capture may lie in the memory of a later one's results: these must be read, in the stream's order, before the
earlier one is replayed. A later capture may read an earlier one's results, which existed when it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Captured:
    """``outputs`` are filled anew by every `replay`. ``work`` is held because it holds what it reads: a graph knows
    addresses alone, and memory that is given back becomes another tensor's."""

    outputs: Tensors
    replay: Callable[[], None]
    work: Callable[[], Tensors]


class Capture(Protocol):
    """A way to make work replayable."""

    def __call__(self, work: Callable[[], Tensors]) -> Captured:
        """Run ``work``, at least once, so it must be harmless now, and keep it."""
        ...


class CudaCapture:
    """CUDA graphs over one memory pool. Capture the largest first: smaller ones then fit into what it has left."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], Tensors]) -> Captured:
        """Run ``work`` once, then capture it."""
        # Kernels are compiled and libraries find their workspaces in a run that is not captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            torch.cuda.synchronize()
            # Not torch.cuda.graph: it collects garbage and empties the cache each time, which takes longer than this.
            graph = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile: the heartbeat reads the device's memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                with suppress(RuntimeError):  # says that the capture failed; the reason is raised below
                    graph.capture_end()
                raise
            graph.capture_end()
            # The first replay uploads the graph to the device: no request shall wait for that.
            graph.replay()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(outputs, graph.replay, work)


def run_eagerly(work: Callable[[], Tensors]) -> Captured:
    """Capture nothing: every replay runs ``work`` and copies its results over the first ones."""
    outputs = work()

    def replay() -> None:
        for old, new in zip(outputs, work(), strict=True):
            old.copy_(new)

    return Captured(outputs, replay, work)
