"""What one request asks of the sampler; the names and defaults are vLLM's and OpenAI's."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RequestOutputKind(str, Enum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last one
    FINAL_ONLY = "final_only"  # one output, at the end


@dataclass
class SamplingParams:
    """Sampling and stopping rules of one request.

    Validation (`__post_init__`) raises ValueError naming the field, its value and the limit.
    ``temperature == 0`` is greedy; ``top_k`` of 0 or -1 means off; ``logprobs`` counts the alternatives
    besides the sampled token, -1 for the whole vocabulary; ``seed`` None draws one per request.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # Filled by the input processor, not by callers: bad_words as token id sequences.
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
