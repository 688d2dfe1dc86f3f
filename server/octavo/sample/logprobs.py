"""Log-probabilities of sampled and prompt tokens, from the model's own (raw) logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import octavo_kernels
from octavo.sample import devices
from octavo.sample.candidates import block_floor, candidates

_CHUNK = 1 << 23  # logits at a time: bounds the memory of long prompts


@dataclass
class LogprobsTensors:
    """The chosen token first, then the most likely ones in order (the lower id first among equals).

    A row that asked for fewer than ``k`` is cut by the reader; one that asked for none is padding (id -1, -inf).
    """

    token_ids: Tensor  # int64 [R, k + 1]
    logprobs: Tensor  # float32 [R, k + 1]
    ranks: Tensor  # int64 [R], of the chosen token, from 1

    def take(self, rows: Tensor) -> LogprobsTensors:
        """Return only ``rows``, int64 [N]."""
        return LogprobsTensors(self.token_ids[rows], self.logprobs[rows], self.ranks[rows])

    @classmethod
    def padding(cls, num_rows: int, k: int, device: torch.device) -> LogprobsTensors:
        """Rows that asked for none."""
        return cls(
            torch.full((num_rows, k + 1), -1, dtype=torch.int64, device=device),
            torch.full((num_rows, k + 1), -torch.inf, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


def joined_logprobs(parts: Sequence[tuple[int, LogprobsTensors | None]]) -> LogprobsTensors | None:
    """Stack the log-probabilities of parts of so many rows each; of those without any there is padding. None: none has
    any."""
    known = [part for _, part in parts if part is not None]
    if not known:
        return None
    k, device = max(part.token_ids.shape[1] for part in known) - 1, known[0].ranks.device
    out = LogprobsTensors.padding(sum(count for count, _ in parts), k, device)
    start = 0
    for count, part in parts:
        if part is not None:
            rows, columns = slice(start, start + count), part.token_ids.shape[1]
            out.token_ids[rows, :columns], out.logprobs[rows, :columns] = part.token_ids, part.logprobs
            out.ranks[rows] = part.ranks
        start += count
    return out


def gather_logprobs(logprobs: Tensor, token_ids: Tensor, k: int) -> LogprobsTensors:
    """Take from ``logprobs`` [N, V] those of the chosen tokens ``token_ids`` [N], their ranks and the ``k`` best."""
    chosen = token_ids[:, None]
    value = logprobs.gather(1, chosen)
    better = torch.gt(logprobs, value, out=torch.empty_like(logprobs))  # summed as floats: exact, 5 times faster
    ranks = better.sum(-1).long() + 1
    if k == 0:
        return LogprobsTensors(chosen, value, ranks)
    if devices.on_cpu(logprobs) and k < logprobs.shape[1]:
        values, known = candidates(logprobs, block_floor(logprobs, k))
        best, order = torch.sort(values, dim=-1, descending=True, stable=True)  # known ids ascend
        ids = known.gather(1, order)
    else:
        best, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return LogprobsTensors(torch.cat((chosen, ids[:, :k]), 1), torch.cat((value, best[:, :k]), 1), ranks)


def compute_prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> LogprobsTensors:
    """Logits [T, V] of prompt positions, the tokens [T] that follow them, and how many alternatives (-1: all)."""
    vocab_size = logits.shape[1]
    k = vocab_size if k < 0 else min(k, vocab_size)
    if not devices.on_cpu(logits) and len(logits):
        rows = torch.arange(len(logits), device=logits.device)
        return LogprobsTensors(*octavo_kernels.top_logprobs(logits, rows, next_token_ids, k))
    step = max(1, _CHUNK // vocab_size)
    parts = [
        gather_logprobs(logits[i : i + step].float().log_softmax(-1), next_token_ids[i : i + step], k)
        for i in range(0, len(logits), step)
    ]
    if not parts:
        return LogprobsTensors.padding(0, k, logits.device)
    return LogprobsTensors(
        torch.cat([p.token_ids for p in parts]),
        torch.cat([p.logprobs for p in parts]),
        torch.cat([p.ranks for p in parts]),
    )
