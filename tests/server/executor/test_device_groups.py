"""The choice between memory that GPUs map and NCCL: all ranks make the same one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.executor import device_groups
from octavo_kernels import gpu_parts

RANKS = 3


def open_all(folder: Path, **parallel: Any) -> list[str]:
    """The kind of each rank's group."""
    about = {"world_size": RANKS, "distributed_timeout_seconds": 20.0, "disable_custom_all_reduce": False} | parallel
    config: Any = SimpleNamespace(parallel=SimpleNamespace(**about))
    found: list[Any] = [None] * RANKS

    def open_one(rank: int) -> None:
        found[rank] = device_groups.open_device_group(config, rank, folder)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks whose memory cannot be mapped, though the driver says that it can be."""
    ranks: set[int] = set()

    def map_memory(group: Any, store: Any, name: str) -> str:
        if group.rank() in ranks:
            raise RuntimeError("the socket cannot be opened")
        return "mapped"

    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    monkeypatch.setattr(device_groups, "_can_map_each_other", lambda ranks: True)
    monkeypatch.setattr(device_groups, "_map", map_memory)
    monkeypatch.setattr(device_groups, "_nccl", lambda group, timeout: "nccl")
    return ranks


@pytest.mark.parametrize("ranks", [(), (1,), (0, 2)], ids=str)
def test_a_rank_that_cannot_map_memory_takes_all_to_nccl(
    ranks: tuple[int, ...], broken: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken.update(ranks)
    assert open_all(tmp_path) == ["nccl" if ranks else "mapped"] * RANKS
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (RANKS if ranks else 0)
    assert all(f"rank {ranks[0]}: the socket" in message for message in warnings)


def test_mapped_memory_is_turned_off(broken: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "parts_off", lambda: frozenset({"exchange"}))
    assert open_all(tmp_path) == ["nccl"] * RANKS


def test_unknown_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_parts.ENV, "pdl, graphs")
    gpu_parts.parts_off.cache_clear()
    with pytest.raises(ValueError, match=r"OCTAVO_GPU_OFF: 'graphs' is not known; give words of pdl, small-linear"):
        gpu_parts.parts_off()
    gpu_parts.parts_off.cache_clear()
