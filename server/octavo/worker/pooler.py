"""Embeddings: one vector a prompt, pooled from the model's last hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from octavo.worker.host_copy import HostCopy
from octavo.worker.input_batch import StepInputs

POOLINGS = ("mean", "last")


class Pooler:
    """Pools each prompt over its chunks, until the last one is computed."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._kinds

    def add(self, req_id: str, kind: str) -> None:
        """``kind``: one of POOLINGS."""
        self._kinds[req_id] = kind

    def remove(self, req_id: str) -> None:
        """Forget a prompt; unknown ones are ignored."""
        self._kinds.pop(req_id, None)
        self._sums.pop(req_id, None)

    def start(
        self, req_ids: list[str], inputs: StepInputs, hidden: torch.Tensor, ended: set[str]
    ) -> Iterator[tuple[str, Callable[[], list[float]]]]:
        """Add a step's chunks, ``hidden [T, H]``. Of each prompt in ``ended``: a call that waits for its vector.

        Vectors are float32 [H] of length 1 (L2). Sums are float64, so that they do not depend on how prompts are cut.
        """
        for i, req_id in enumerate(req_ids):
            if req_id not in self._kinds:
                continue
            chunk = hidden[int(inputs.starts[i]) : int(inputs.starts[i + 1])]
            if self._kinds[req_id] == "mean":
                total = chunk.double().sum(0)
                self._sums[req_id] = self._sums[req_id] + total if req_id in self._sums else total
            else:
                self._sums[req_id] = chunk[-1].double()
            if req_id in ended:
                copy = HostCopy([torch.nn.functional.normalize(self._sums.pop(req_id), dim=0).float()])
                yield req_id, lambda copy=copy: copy.wait()[0].tolist()  # type: ignore[misc]
