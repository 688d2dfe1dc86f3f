"""Captures on a GPU, whose part is played."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octavo.worker.gpu.graphs import CudaCapture


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the GPU. A capture in which something went wrong cannot be ended without an error."""
    done: list[str] = []

    def capture_end() -> None:
        done.append("end")
        if "went wrong" in done:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    graph = SimpleNamespace(
        capture_begin=lambda **options: done.append("begin"),
        capture_end=capture_end,
        replay=lambda: done.append("replay"),
    )
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: graph,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in, raising=False)
    return done


def test_work_runs_then_is_captured_then_replayed(done: list[str]) -> None:
    def work() -> tuple[Tensor, ...]:
        done.append("work")
        return ()

    captured = CudaCapture()(work)
    assert done == ["work", "begin", "work", "end", "replay"]
    captured.replay()
    assert done[5:] == ["replay"]


def test_an_error_within_a_capture_is_raised_itself(done: list[str]) -> None:
    def work() -> tuple[Tensor, ...]:
        if "begin" in done:
            done.append("went wrong")
            raise ValueError("no kernel for this shape")
        return ()

    with pytest.raises(ValueError, match="no kernel for this shape"):
        CudaCapture()(work)
    assert done == ["begin", "went wrong", "end"]
