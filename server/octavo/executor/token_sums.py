"""Whether all ranks sample the same tokens: each adds up what it has sampled, and they compare at times."""

from __future__ import annotations

from octavo.interface.step import ModelRunnerOutput

EVERY = 256  # steps
_MASK = (1 << 64) - 1


class TokenSum:
    """A sum of 64 bits of all tokens that were sampled, each with its step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.value = 0

    def add(self, output: ModelRunnerOutput) -> bool:
        """Add a step's; whether it is time to compare."""
        self.num_steps += 1
        tokens = sum(map(sum, output.sampled_token_ids.values()))
        self.value = (self.value * 3 + tokens + 1) & _MASK
        return self.num_steps % EVERY == 0
