"""Check that all ranks sample the same tokens: each adds up its samples, and they compare at times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.interface.step import ModelRunnerOutput

EVERY = 256  # steps
_MASK = (1 << 64) - 1


class TokenSum:
    """A sum of 64 bits of all tokens that were sampled, each with its step."""

    def __init__(self, rank: int = 0) -> None:
        self.num_steps = 0
        self.value = 0
        self._rank = rank
        self._past: deque[tuple[int, int]] = deque(maxlen=8)  # that others may have come to only now

    def add(self, output: ModelRunnerOutput) -> bool:
        """Add a step's; whether it is time to compare."""
        self.num_steps += 1
        tokens = sum(map(sum, output.sampled_token_ids.values()))
        self.value = (self.value * 3 + tokens + 1) & _MASK
        if self.num_steps % EVERY:
            return False
        self._past.append((self.num_steps, self.value))
        return True

    def compare(self, sums: Iterable[tuple[int, bytearray]]) -> None:
        """Raise RuntimeError where a rank has sampled other tokens than this one. ``sums``: ranks, and as msgpack their
        numbers of steps and sums."""
        import msgspec

        ours = dict(self._past)
        for number, payload in sums:
            steps, value = msgspec.msgpack.decode(payload, type=tuple[int, int])
            if ours.get(steps, value) != value:
                raise RuntimeError(
                    f"ranks have sampled different tokens within {steps} steps: the sum of rank {self._rank} is "
                    f"{ours[steps]:016x}, that of rank {number} {value:016x}"
                )
