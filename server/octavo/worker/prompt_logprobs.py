"""Log-probabilities of prompts' own tokens (``prompt_logprobs``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from octavo.interface.messages import LogprobsLists
from octavo.sample import devices
from octavo.sample.logprobs import compute_prompt_logprobs
from octavo.worker.host_copy import HostCopy
from octavo.worker.input_batch import InputBatch, StepInputs

# Rows of logits made at once: [256, vocabulary] float32 is 50 MB for 49k entries.
MAX_LOGITS_ROWS = 256


class PromptLogprobs:
    """The sequences whose prompts' log-probabilities are wanted, and what a step computes for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_logprobs: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._num_logprobs)

    def add(self, req_id: str, num_logprobs: int) -> None:
        """``num_logprobs``: alternatives of each position, -1 for the whole vocabulary."""
        self._num_logprobs[req_id] = num_logprobs

    def remove(self, req_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._num_logprobs.pop(req_id, None)

    def start(
        self, batch: InputBatch, req_ids: list[str], inputs: StepInputs, logits_of: Callable[[np.ndarray], Tensor]
    ) -> Iterator[tuple[str, Callable[[], LogprobsLists]]]:
        """Start the step's share of each prompt, whose call waits for it. ``logits_of`` maps indices int64 [n] of the
        step's tokens to logits [n, V]; ``batch`` does not count the step's tokens as computed yet.

        Position p's logits predict prompt token p + 1: the rows before the prompt's last one count.
        """
        for i, req_id in enumerate(req_ids):
            k = self._num_logprobs.get(req_id)
            if k is None:
                continue
            row = batch.row_of[req_id]
            start = int(batch.num_computed[row])
            count = min(int(inputs.seq_lens[i]), int(batch.num_prompt[row]) - 1) - start
            if count <= 0:
                continue
            targets = batch.token_ids[row, start + 1 : start + 1 + count].astype(np.int64)
            parts = []
            for at in range(0, count, MAX_LOGITS_ROWS):
                end = min(at + MAX_LOGITS_ROWS, count)
                logits = logits_of(np.arange(inputs.starts[i] + at, inputs.starts[i] + end))
                part = compute_prompt_logprobs(logits, devices.put(targets[at:end], self._device), k)
                parts.append(HostCopy([part.token_ids, part.logprobs, part.ranks]))
            yield req_id, partial(_join, parts)


def _join(parts: list[HostCopy]) -> LogprobsLists:
    """Wait for the parts of one prompt and join them."""
    columns = zip(*([tensor.tolist() for tensor in part.wait()] for part in parts), strict=True)
    return LogprobsLists(*(list(chain.from_iterable(column)) for column in columns))
