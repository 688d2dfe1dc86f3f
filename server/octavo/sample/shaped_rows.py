"""The rows of running requests whose distribution is shaped (see `shaping.py`). A step without any pays nothing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import devices
from octavo.sample.gumbel import position_keys
from octavo.sample.shaping import RepeatedRow, Repetition

_CHANCE = np.uint64(0x8E3C5B2F1D47A96B)  # makes a stream of its own of a row's


class ShapedRows:
    """The wishes of requests, by row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._repetitions: dict[int, Repetition] = {}
        self.any = np.zeros(num_rows, np.bool_)  # which rows are shaped
        self.sigma = np.zeros(num_rows, np.float32)  # 0: off
        self.probability = np.zeros(num_rows)  # of XTC
        self.threshold = np.zeros(num_rows, np.float32)

    def add(self, row: int, params: SamplingParams) -> None:
        """Note what a request asks for."""
        p = params
        if p.dry_multiplier > 0:
            breakers = torch.zeros(self._vocab_size, dtype=torch.bool)
            breakers[[token for token in p.dry_breaker_token_ids if token < self._vocab_size]] = True
            sequences = [devices.put(np.array(one), self._device) for one in p.dry_breaker_sequences]
            self._repetitions[row] = Repetition(
                p.dry_multiplier,
                p.dry_base,
                p.dry_allowed_length,
                p.dry_penalty_last_n,
                devices.put(breakers, self._device),
                sequences,
            )
        self.sigma[row] = max(0.0, p.top_n_sigma)
        self.probability[row] = 0.0 if p.greedy else p.xtc_probability
        self.threshold[row] = p.xtc_threshold
        self.any[row] = p.shapes_logits

    def remove(self, row: int) -> None:
        """Forget a request."""
        self._repetitions.pop(row, None)
        self.any[row] = False
        self.sigma[row] = self.probability[row] = 0

    def repeated(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], at: NDArray[np.int64]
    ) -> list[RepeatedRow] | None:
        """The rows of a step with DRY; None: there is none."""
        if not self._repetitions:
            return None
        found = enumerate(zip(rows.tolist(), slots.tolist(), at.tolist(), strict=True))
        return [
            RepeatedRow(number, slot, position, self._repetitions[row])
            for number, (row, slot, position) in found
            if row in self._repetitions
        ] or None

    def applies(self, rows: NDArray[np.int64], streams: NDArray[np.uint64], at: NDArray[np.int64]) -> Tensor:
        """Draw bool [N] whether XTC applies to these rows at these positions: the same whatever else is in the step."""
        keys = position_keys(streams ^ _CHANCE, at)
        chance = keys.view(np.uint64)[:, 0] >> np.uint64(11)
        return devices.put(chance * 2.0**-53 < self.probability[rows], self._device)
