"""The vocabulary of a draft head that knows only some of the model's tokens, mostly the frequent ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.layers.weights import WeightSlot, WeightSource


class DraftVocabulary(nn.Module):
    """``size`` tokens of ``vocab_size``. Checkpoints hold them as ``token_map``, token by token, or as ``d2t``: how far
    behind a token's number here the vocabulary has it."""

    tokens: Tensor

    def __init__(self, size: int, vocab_size: int, leaf: str) -> None:
        super().__init__()
        self._vocab_size, self._leaf = vocab_size, leaf
        self.register_buffer("tokens", torch.empty(size, dtype=torch.int64), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Logits ``[R, size]`` in the places of their tokens, ``[R, vocab_size]``: -inf elsewhere."""
        found = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        found[:, self.tokens] = logits
        return found

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The tokens."""
        yield WeightSlot(0, self._leaf, tuple(self.tokens.shape), self._load, qtypes=("I64", "I32"))

    def _load(self, source: WeightSource) -> None:
        tokens = source.load(torch.int64)
        if self._leaf == "d2t":
            tokens += torch.arange(len(tokens), device="cpu")
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ModelError(
                f"tensor {source.name!r} makes token {at} of the head token {int(tokens[at])} of the vocabulary, which "
                f"has {self._vocab_size}; the weights and the configuration are not of one model"
            )
        self.tokens.copy_(tokens)
