"""Pinned memory between files and a device whose copies are made late: nothing is overwritten before it was copied."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.loader.staging import Staging
from octavo.system.file_reading import read_into

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


class LateDevice:
    """Copies in order, each when it must be or when ``rng`` likes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.waiting: deque[Callable[[], object]] = deque()
        self.done = self.asked = 0

    def ask(self, copy: Callable[[], object]) -> None:
        self.waiting.append(copy)
        self.asked += 1
        self.run_until(self.rng.randint(0, self.asked))

    def run_until(self, count: int) -> None:
        while self.done < count:
            self.waiting.popleft()()
            self.done += 1

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device, self.mark = device, 0

    def record(self) -> None:
        self.mark = self.device.asked

    def synchronize(self) -> None:
        self.device.run_until(self.mark)


class LateTensor:
    """What `Staging.fill` sees of a flat tensor there."""

    def __init__(self, late: LateDevice, tensor: torch.Tensor) -> None:
        self._late, self._tensor = late, tensor
        self.dtype, self.device, self.numel = tensor.dtype, tensor.device, tensor.numel

    def __getitem__(self, part: slice) -> LateTensor:
        return LateTensor(self._late, self._tensor[part])

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._late.ask(lambda: self._tensor.copy_(source))


def stored(rng: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([rng.randrange(2 if dtype == torch.bool else 100) for _ in range(count)]).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def load(seed: int, path: Path, size: int, counts: list[int]) -> None:
    """One thread: a tensor after the other from a file of its own into tensors of any dtype."""
    rng = random.Random(seed)
    late = LateDevice(rng)
    staging = Staging(late.event, size)
    made = [stored(rng, count, rng.choice(DTYPES)) for count in counts]
    path.write_bytes(b"".join(map(raw, made)))
    offset = 0
    for tensor in made:
        target = torch.ones(tensor.shape, dtype=rng.choice([tensor.dtype, torch.float32, torch.bfloat16]))
        start, wanted = offset, tensor.to(target.dtype)
        staging.fill(
            LateTensor(late, target),  # type: ignore[arg-type]
            tensor.dtype,
            lambda buffer, first, start=start: read_into(buffer, path, start + first, "it"),
        )
        assert not late.waiting
        assert raw(target) == raw(wanted)
        offset += tensor.numel() * tensor.itemsize


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([8, 16, 64, 256]),
    pieces=st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2)), min_size=1, max_size=8),
    threads=st.integers(1, 3),
)
def test_the_file_s_bytes_arrive(
    seed: int, size: int, pieces: list[tuple[int, int]], threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensors of some whole pieces, a little more or less; threads do not meet."""
    counts = [
        max(0, whole * size // random.Random(seed + i).choice([1, 2, 4, 8]) + more)
        for i, (whole, more) in enumerate(pieces)
    ]
    folder = tmp_path_factory.mktemp("staging")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: load(seed + i, folder / str(i), size, counts), range(threads)))


def test_reads_that_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self, file: Any) -> None:
            self.file, self.seek = file, file.seek

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def readinto(self, buffer: memoryview) -> int:
            return self.file.readinto(buffer[:3])

    plain = open
    monkeypatch.setattr("octavo.system.file_reading.open", lambda *a, **k: Slow(plain(*a, **k)), raising=False)
    load(1, tmp_path / "w", 64, [7, 8, 9, 63, 64, 65, 200])


def test_it_reads_while_it_copies_also_until_a_read_fails(tmp_path: Path) -> None:
    late = LateDevice(random.Random(2))
    late.rng.randint = lambda low, high: low  # type: ignore[method-assign]  # as late as can be
    staging = Staging(late.event, 16)
    path = tmp_path / "short"
    path.write_bytes(bytes(range(72)))
    copied_before = []

    def read(buffer: memoryview, first: int) -> None:
        copied_before.append(late.done)
        read_into(buffer, path, first, "it")

    target = torch.zeros(80, dtype=torch.uint8)
    with pytest.raises(ModelError, match="cut short"):
        staging.fill(LateTensor(late, target), torch.uint8, read)  # type: ignore[arg-type]
    assert copied_before == [0, 0, 1, 2, 3]
    assert not late.waiting and target[:64].tolist() == list(range(64))
    staging.fill(LateTensor(late, target[:72]), torch.uint8, read)  # type: ignore[arg-type]
    assert target[:72].tolist() == list(range(72))
