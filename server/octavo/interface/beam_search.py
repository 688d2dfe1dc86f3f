"""Parameters and results of `LLM.beam_search`, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.interface.lora import LoRARequest
from octavo.interface.outputs import PositionLogprobs

MAX_BEAM_WIDTH = 256


@dataclass
class BeamSearchParams:
    """``beam_width``: sequences that are followed, and returned. ``length_penalty``: an answer's log-probability is
    divided by its length to this power; above 0 prefers longer ones. ``ignore_eos``: all have ``max_tokens``.
    ``include_stop_str_in_output``: the token that ends a sequence is among its tokens. ``temperature`` is 0: the scores
    are the model's own. Raises ValueError."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                raise ValueError(f"{name} must be an integer from 1{f' to {most}' if most else ''}, got {value!r}")
        if self.temperature != 0:
            raise ValueError(f"temperature must be 0, got {self.temperature!r}: the scores are the model's own")


@dataclass
class BeamSearchSequence:
    """One answer. ``tokens`` and ``text`` include the prompt; ``logprobs`` has a dict for each token of the answer, and
    ``cum_logprob`` is their sum."""

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" | "length"
    stop_reason: int | None = None  # the token that ended it


@dataclass
class BeamSearchOutput:
    """The ``beam_width`` best answers to a prompt, the best first; fewer where a vocabulary has no more."""

    sequences: list[BeamSearchSequence]
