"""What is asked of a model that guesses tokens from the hidden states of another one, its target."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.models.base import CausalLM, Model


class StateReader(Model):
    """A layer for multi-token prediction, or draft heads. In a step of the target it reads a state a token (`read`,
    `join`) and makes its own of each with the token that follows (`predict`); from that of the last token the first
    guess is made (`guess`), with which the next state is made, and so on."""

    def attach(self, target: CausalLM) -> None:
        """Get ready to guess for ``target``: once, before its first step."""

    def read(self, target: CausalLM, deferred: DeferredHidden) -> Tensor:
        """What is read of a step of ``target``, a row a token ``[T, ...]``, from what its `begin` returned."""
        return target.finish(*deferred)

    def join(self, states: Tensor) -> Tensor:
        """Rows of what was read as the states ``[R, H]`` before the next tokens."""
        return states

    @abstractmethod
    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """The state ``[T, H]`` from which the token after ``input_ids`` int64 [T] is guessed, and the next state made.
        ``before [T, H]``: the state before that token, at ``positions`` int64 [T]."""

    @abstractmethod
    def guess(self, state: Tensor, number: int) -> Tensor:
        """Logits ``[R, vocab_size]`` of states ``[R, H]`` from which guess ``number``, from 0, is made."""
