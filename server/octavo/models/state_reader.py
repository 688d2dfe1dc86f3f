"""The interface of a model that guesses tokens from the hidden states of another one, its target."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from torch import Tensor

from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.layers.embedding import ParallelLMHead
from octavo.models.base import CausalLM, Model
from octavo.models.draft_vocabulary import DraftVocabulary


class StateReader(Model):
    """A checkpoint's layers for multi-token prediction, or draft heads. In a step of the target it reads a state a
    token (`read`) and makes its own of each with the token that follows (`predict`); from that of the last token the
    first guess is made (`guess`), with which the next state is made, and so on."""

    @property
    def num_reads(self) -> int:
        """The number of times a step's tokens are read: time i with the token i + 1 places further on, after which
        guess i is made. The states of later guesses are predicted one by one, as the last time. 0: tokens are not read,
        all guesses rest on the target's states."""
        return 1

    @property
    def num_kinds(self) -> int:
        """Guesses of this number less 1 and of higher ones are made in the same way."""
        return self.num_reads + 1

    def attach(self, target: CausalLM) -> None:
        """Get ready to guess for ``target``: once, before its first step."""

    def read(self, target: CausalLM, deferred: DeferredHidden, hidden: Tensor) -> Tensor:
        """The states before the next tokens ``[T, H]`` of a step of ``target``, from what its `begin` returned, and
        what its `finish` made of all of that."""
        return hidden

    @abstractmethod
    def predict(
        self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int = 0
    ) -> Tensor:
        """The state ``[T, H]`` from which the token after ``input_ids`` int64 [T] is guessed, and the next state made.
        ``before [T, H]``: the state before that token, at ``positions`` int64 [T]; ``number``: the time of reading."""

    @abstractmethod
    def head(self, number: int) -> ParallelLMHead:
        """The head that makes logits for guess ``number``, from 0."""

    @abstractmethod
    def head_input(self, state: Tensor, number: int) -> Tensor:
        """The input of `head`, from the states ``[R, H]`` with which guess ``number`` is made."""

    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens of `head`, where they are not all."""
        return None

    def guess(self, state: Tensor, number: int) -> Tensor:
        """Logits ``[R, vocab_size]`` of states ``[R, H]`` from which guess ``number`` is made."""
        return self.of_all_tokens(self.head(number)(self.head_input(state, number)))

    def of_all_tokens(self, logits: Tensor) -> Tensor:
        """Expand `head`'s result ``[R, ...]`` to logits of the whole vocabulary."""
        vocabulary = self.draft_vocabulary()
        return logits if vocabulary is None else cast(Tensor, vocabulary(logits))
