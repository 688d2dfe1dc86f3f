"""Embeddings: one vector a prompt, pooled from the model's last hidden states."""

from __future__ import annotations

import torch

POOLINGS = ("mean", "last")


class Pooler:
    """Keeps what chunks of a prompt have added up to until its last one is computed."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._kinds

    def add(self, req_id: str, kind: str) -> None:
        self._kinds[req_id] = kind

    def remove(self, req_id: str) -> None:
        self._kinds.pop(req_id, None)
        self._sums.pop(req_id, None)

    def take(self, req_id: str, hidden: torch.Tensor, finished: bool) -> torch.Tensor | None:
        """Add a chunk ``hidden [tokens, H]``; with ``finished`` return the pooled vector, float32 [H] of length 1
        (L2).

        Sums are float64, so that the vector does not depend on how the prompt was cut.
        """
        if self._kinds[req_id] == "mean":
            chunk = hidden.double().sum(0)
            self._sums[req_id] = self._sums[req_id] + chunk if req_id in self._sums else chunk
        else:
            self._sums[req_id] = hidden[-1].double()
        if not finished:
            return None
        return torch.nn.functional.normalize(self._sums.pop(req_id), dim=0).float()
