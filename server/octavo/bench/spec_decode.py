"""Measure a server's speculation during a run, from its metrics before and after, under vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import httpx

_LINE = re.compile(r'vllm:spec_decode_num_(\w+?)_total(?:\{(?:.*\bposition="(\d+)")?.*\})? (\S+)$')


@dataclass
class SpecDecodeCounts:
    """Sums over the engines of a server."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    per_position: dict[int, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SpecDecodeCounts | None:
        """Read the counters from a page of metrics; None without speculation."""
        found, counts = False, cls()
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            found, name, value = True, match[1], float(match[3])
            if name == "accepted_tokens_per_pos" and match[2] is not None:
                position = int(match[2])
                counts.per_position[position] = counts.per_position.get(position, 0.0) + value
            elif name in ("drafts", "draft_tokens", "accepted_tokens"):
                setattr(counts, name, getattr(counts, name) + value)
        return counts if found else None

    def since(self, before: SpecDecodeCounts) -> SpecDecodeCounts:
        """Return the difference to earlier counters."""
        return SpecDecodeCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            {at: value - before.per_position.get(at, 0.0) for at, value in self.per_position.items()},
        )

    @property
    def acceptance_rate(self) -> float:
        """Per cent of the guessed tokens that were right."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step with guesses: the right ones and the one that comes anyway."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def per_position_rates(self) -> list[float]:
        """Return the share of drafts that were right up to each position."""
        return [self.per_position[at] / self.drafts if self.drafts else 0.0 for at in sorted(self.per_position)]

    def to_dict(self) -> dict[str, Any]:
        """The counts under the keys of vLLM's benchmark."""
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.draft_tokens),
            "spec_decode_accepted_tokens": int(self.accepted_tokens),
            "spec_decode_per_position_acceptance_rates": self.per_position_rates,
        }


def read_counts(connection: dict[str, Any]) -> SpecDecodeCounts | None:
    """Read the counters of the server under load; None if it reports no speculation."""
    try:
        with httpx.Client(**connection, trust_env=False, timeout=5) as client:
            return SpecDecodeCounts.parse(client.get("/metrics").text)
    except httpx.HTTPError:
        return None
