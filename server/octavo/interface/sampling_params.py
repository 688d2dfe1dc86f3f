"""Sampling parameters of one request; names and defaults are vLLM's and OpenAI's."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from octavo.interface.structured_output import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5  # temperatures below it are greedy, as in vLLM

# Caps on what one request may cost, whoever sends it.
MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1_000  # characters of one stop string or bad word
MAX_STOP_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 4_096  # entries
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_DRY_MULTIPLIER, MAX_DRY_BASE = 100, 100
MAX_DRY_BREAKERS = 64
MAX_INT = 2**31 - 1  # of counts that have no limit of their own


# Fields of vLLM's, now or once -> what to do instead.
_INSTEAD = {
    "guided_decoding": "give structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "truncate_prompt_tokens": "cut the prompt, as its token ids",
    "best_of": "give n, and choose by cumulative_logprob",
    "use_beam_search": "call LLM.beam_search with BeamSearchParams",
    "length_penalty": "call LLM.beam_search with BeamSearchParams",
    "early_stopping": "call LLM.beam_search with BeamSearchParams",
    "extra_args": "there is nothing that reads them; leave it out",
}


class RequestOutputKind(StrEnum):
    """The content of each RequestOutput of a request."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last one
    FINAL_ONLY = "final_only"  # one output, at the end


@dataclass
class SamplingParams:
    """Sampling and stopping rules of one request.

    Validation (`__post_init__`) raises ValueError naming the field, its value and the limit; `verify` does so for what
    depends on the model. ``temperature == 0`` is greedy; ``top_k`` of 0 or -1 means off; ``logprobs`` counts the
    alternatives besides the sampled token, -1 for the whole vocabulary; ``logprob_token_ids`` names these, whatever
    their rank, in place of the most likely ones; ``seed`` None (or -1) draws one per request;
    ``max_tokens`` None lets the request run to the model's limit; ``stop`` becomes a list.
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
    structured_outputs: StructuredOutputsParams | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None  # tokens that `LLM.chat` lets the model think; None: no limit
    # llama.cpp's, with its defaults
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = -1.0
    # Filled by the input processor: tokens that hold a breaker, and breakers of several tokens.
    dry_breaker_token_ids: list[int] = field(default_factory=list)
    dry_breaker_sequences: list[list[int]] = field(default_factory=list)

    def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
        """Refuse unknown fields with what to do instead: TypeError."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                near = get_close_matches(name, cls.__dataclass_fields__, 1)
                instead = _INSTEAD.get(name) or (f"did you mean {near[0]}?" if near else "leave it out")
                raise TypeError(f"SamplingParams() has no {name!r}; {instead}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        self.temperature = _number("temperature", self.temperature, 0, hint="0 is greedy")
        self.top_p = _number("top_p", self.top_p, 0, 1, above=True, hint="1 turns it off")
        self.top_k = _integer("top_k", self.top_k, -1, hint="0 or -1 turns it off")
        self.min_p = _number("min_p", self.min_p, 0, 1, hint="0 turns it off")
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0, above=True, hint="1 turns it off"
        )
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**63 - 1)
            self.seed = None if self.seed == -1 else self.seed
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        self.thinking_token_budget = _budget("thinking_token_budget", self.thinking_token_budget)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _integer(name, value, -1, hint="-1 asks for the whole vocabulary"))
        self.stop = _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS)
        self.bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self.bad_words_token_ids = [_token_ids("bad_words_token_ids", word) for word in self.bad_words_token_ids]
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty: no token would be allowed; leave it out instead")
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        self._name_logprobs()
        self._check_shapes()
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(kind.value for kind in RequestOutputKind)
            raise ValueError(f"output_kind must be one of {kinds}, got {_shown(self.output_kind)}") from None

    def _check_shapes(self) -> None:
        self.dry_multiplier = _number("dry_multiplier", self.dry_multiplier, 0, MAX_DRY_MULTIPLIER, hint="0 is off")
        self.dry_base = _number("dry_base", self.dry_base, 1, MAX_DRY_BASE)
        self.dry_allowed_length = _integer("dry_allowed_length", self.dry_allowed_length, 0)
        self.dry_penalty_last_n = _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, hint="-1 is all, 0 off")
        breakers = self.dry_sequence_breakers
        self.dry_sequence_breakers = _strings("dry_sequence_breakers", breakers, MAX_DRY_BREAKERS)
        self.xtc_probability = _number("xtc_probability", self.xtc_probability, 0, 1, hint="0 is off")
        self.xtc_threshold = _number("xtc_threshold", self.xtc_threshold, 0, 1, hint="above 0.5 is off")
        self.top_n_sigma = _number("top_n_sigma", self.top_n_sigma, -1, hint="0 or below is off")
        if self.dry_penalty_last_n == 0:
            self.dry_multiplier = 0.0
        if self.xtc_threshold > 0.5:  # no two tokens are as likely
            self.xtc_probability = 0.0

    def _name_logprobs(self) -> None:
        """Make ``logprobs`` the number of ``logprob_token_ids``, where these are given."""
        if self.logprob_token_ids is None:
            return
        self.logprob_token_ids = _token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        count = len(self.logprob_token_ids)
        if not count:
            raise ValueError("logprob_token_ids must not be empty; leave it out, or name a token")
        if self.logprobs not in (None, count):
            raise ValueError("logprob_token_ids names the tokens that logprobs would choose; give one of them")
        self.logprobs = count

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken instead of a random one."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def reads_tokens(self) -> bool:
        """True if what may be sampled depends on which tokens came before."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.bad_words_token_ids or self.shapes_logits)

    @property
    def shapes_logits(self) -> bool:
        """True if DRY, XTC or top-n-sigma is on."""
        return self.dry_multiplier > 0 or self.top_n_sigma > 0 or (self.xtc_probability > 0 and not self.greedy)

    @property
    def edits_logits(self) -> bool:
        """True if sampling needs more than greedy, temperature, top-k, top-p and min-p, whatever came before."""
        named = self.logit_bias or self.allowed_token_ids is not None
        return bool(named or self.min_tokens or self.logprobs is not None or self.prompt_logprobs is not None)

    def verify(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check what depends on the model: token ids below ``vocab_size``, and at most ``max_logprobs`` alternatives a
        token (-1: no limit). Raises ValueError."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            ids = getattr(self, name)
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"{name} must hold token ids between 0 and {vocab_size - 1} (the model's vocabulary), "
                    f"got {max(ids)}"
                )
        limit = vocab_size if max_logprobs < 0 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if name == "logprobs" and self.logprob_token_ids is not None:
                continue  # which has a limit of its own
            if value is not None and (vocab_size if value < 0 else value) > limit:
                raise ValueError(
                    f"{name} must be at most {limit}, got {value}; ask for fewer, or start the engine with a higher "
                    "max_logprobs"
                )

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one. Not validated again."""
        other = copy.copy(self)
        other.stop, other.stop_token_ids, other.bad_words = list(self.stop), [*self.stop_token_ids], [*self.bad_words]
        other.logit_bias = None if self.logit_bias is None else dict(self.logit_bias)
        other.allowed_token_ids = None if self.allowed_token_ids is None else list(self.allowed_token_ids)
        other.logprob_token_ids = None if self.logprob_token_ids is None else list(self.logprob_token_ids)
        other.bad_words_token_ids = [list(word) for word in self.bad_words_token_ids]
        return other

    @classmethod
    def from_generation_config(cls, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """The caller's fields, then the model's defaults (generation_config.json's content), then ours. None counts as
        not given. A default frequency_penalty belongs to the default temperature: with another it does not apply."""
        values = recommended_sampling(defaults)
        if given.get("temperature") is not None:
            values.pop("frequency_penalty", None)
        if defaults.get("max_new_tokens") is not None:
            values["max_tokens"] = defaults["max_new_tokens"]
        set_by_caller = {name: value for name, value in given.items() if value is not None or name in _NONE_MEANS}
        values = {name: value for name, value in values.items() if name not in set_by_caller}
        if "max_tokens" in values and isinstance(given.get("min_tokens"), int):
            values["max_tokens"] = max(values["max_tokens"], given["min_tokens"])
        try:
            cls(**values)
        except ValueError as error:
            raise ValueError(
                f"{error} (a default of the model's generation_config.json: set the field in the request, or start "
                "with --generation-config vllm)"
            ) from None
        return cls(**values, **set_by_caller)


def recommended_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a model's generation_config.json states; empty where it says nothing."""
    values = {
        name: generation_config[name] for name in _FROM_GENERATION_CONFIG if generation_config.get(name) is not None
    }
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return values


_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty")
_NONE_MEANS = ("max_tokens",)  # None says something: no limit


def _shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _range(low: float, high: float, above: bool, hint: str) -> str:
    if math.isinf(high) or high == MAX_INT:
        limits = f"above {low}" if above else f"at least {low}"
        limits += f" and at most {MAX_INT}" if high == MAX_INT else ""
    else:
        limits = f"above {low} and at most {high}" if above else f"between {low} and {high}"
    return limits + (f" ({hint})" if hint else "")


def _number(name: str, value: Any, low: float, high: float = math.inf, above: bool = False, hint: str = "") -> float:
    """A finite number in the range; ``above``: the lower limit itself is outside."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number {_range(low, high, above, hint)}, got {_shown(value)}") from None
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        raise ValueError(f"{name} must be a finite number {_range(low, high, above, hint)}, got {_shown(value)}")
    return number


def _budget(name: str, value: Any) -> int | None:
    budget = -1 if value is None else _integer(name, value, -1, hint="-1 is no limit")
    return None if budget == -1 else budget


def _integer(name: str, value: Any, low: int, high: int = MAX_INT, hint: str = "") -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # numpy's integers too, but no float
    except TypeError:
        raise ValueError(f"{name} must be an integer {_range(low, high, False, hint)}, got {_shown(value)}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be {_range(low, high, False, hint)}, got {_shown(value)}")
    return number


def _items(name: str, values: Any, what: str, limit: int | None) -> list[Any]:
    if values is None:
        return []
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of {what}, got {_shown(values)}")
    items = list(values)
    if limit is not None and len(items) > limit:
        raise ValueError(f"{name} takes at most {limit} entries, got {len(items)}")
    return items


def _strings(name: str, values: Any, limit: int) -> list[str]:
    items = _items(name, values, "strings", limit)
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must hold strings, got {_shown(item)}")
        if not 0 < len(item) <= MAX_STOP_LENGTH:
            raise ValueError(f"{name} must hold strings of 1 to {MAX_STOP_LENGTH} characters, got one of {len(item)}")
    return items


def _token_ids(name: str, values: Any, limit: int | None = None) -> list[int]:
    items = _items(name, values, "token ids", limit)
    if set(map(type, items)) - {int}:
        items = [_integer(f"{name}[{i}]", item, 0) for i, item in enumerate(items)]
    if items and (min(items) < 0 or max(items) > MAX_INT):
        bad = next(item for item in items if not 0 <= item <= MAX_INT)
        raise ValueError(f"{name} must hold token ids between 0 and the vocabulary's size, got {_shown(bad)}")
    return items


def _logit_bias(values: Any) -> dict[int, float]:
    """Keys may be text, as JSON writes them."""
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {_shown(values)}")
    if len(values) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(values)}")
    out: dict[int, float] = {}
    for key, bias in values.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key)
        if isinstance(key, str):
            raise ValueError(f"logit_bias must have token ids as keys, got {_shown(key)}")
        token_id = _integer("logit_bias's token id", key, 0)
        out[token_id] = _number(f"logit_bias[{token_id}]", bias, -100, 100)
    return out
