"""Turns a user's request into an EngineCoreRequest: checks everything, tokenises, fills in defaults.

Every error is a ValueError that names the field, its value, the limit and the way out; offline users see it as it is,
the HTTP server answers it with a 400.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.engine.images import ImageInputs
from octavo.interface.engine_config import EngineConfig
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling import Pooling
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams
from octavo.interface.structured_output import to_grammar
from octavo.text.prefix_token_cache import PrefixTokens

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

# A text, token ids, or a dict with one of them under "prompt" or "prompt_token_ids" (and perhaps "cache_salt").
Prompt = str | Sequence[int] | dict[str, Any]


_MOST_BREAKERS = 64  # that are remembered


class InputProcessor:
    """Makes `EngineCoreRequest`s. Thread-safe, and without state that lets one request change another (`PrefixTokens`
    caches tokens, which saves time and nothing else)."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, max_logprobs: int = -1, strict_json_schema: bool = True
    ) -> None:
        """``max_logprobs``: maximum number of alternatives per token, -1: the vocabulary size.
        ``strict_json_schema``: as for `to_grammar`."""
        self.strict_json_schema = strict_json_schema
        self.max_logprobs = max_logprobs
        self.tokenizer = tokenizer
        self.prefix_tokens = None if tokenizer is None else PrefixTokens(tokenizer)
        self.vocab_size = config.model.vocab_size
        self.max_model_len = config.scheduler.max_model_len
        self.generation_config = config.model.generation_config
        self.model, self.pooler, self.max_num_batched_tokens = config.model, config.model.pooler, 0
        self.has_token_types = config.model.text.num_text_types > 1
        self.follow(config)
        self.eos_token_ids = eos_token_ids(config, tokenizer)
        self.images = ImageInputs(config, tokenizer)
        self._breaker_ids: dict[str, list[int]] = {}  # of DRY: tokens that hold them
        added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
        self._beyond = {i: token.content for i, token in added.items() if i >= self.vocab_size}

    def follow(self, config: EngineConfig) -> None:
        """Take over limits that the core has found."""
        self.max_model_len = config.scheduler.max_model_len
        self.max_num_batched_tokens = config.scheduler.max_num_batched_tokens

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """The caller's fields, then the model's defaults (generation_config.json)."""
        return SamplingParams.from_generation_config(self.generation_config, **given)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
        grammar: str | None = None,
        grammar_field: str | None = None,
        adapter: Adapter | None = None,
    ) -> EngineCoreRequest:
        """Check a request and prepare it for the core. Raises ValueError.

        ``truncate_prompt_tokens``: number of prompt tokens to keep, -1 for as many as the model takes; with
        ``truncation_side`` "left" the last ones, with "right" the first. ``grammar``: that of
        ``params.structured_outputs``, where it exists already; ``grammar_field``: the request field its errors name.
        """
        if not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority must fit 32 bits (-2**31 to 2**31 - 1), got {priority}")
        text, ids, salt = _split_prompt(prompt)
        features = self.images.process(data) if (data := _images_of(prompt)) else None
        salt = cache_salt if cache_salt is not None else salt
        if ids is None:
            ids = self.tokenize(text or "", add_special_tokens, truncate_prompt_tokens, salt)
        else:
            ids = self._check_ids(ids)
        items, boundaries = None, _boundaries_of(prompt, len(ids))
        if features:
            if truncate_prompt_tokens is not None:
                raise ValueError(
                    "truncate_prompt_tokens would cut images of the prompt; leave it out, or send text alone"
                )
            boundaries = [self.images.expanded(ids, position, features) for position in boundaries or ()]
            ids, items = self.images.place(ids, features)
        ids = self._truncate(ids, truncate_prompt_tokens, truncation_side)
        if grammar is None and params.structured_outputs is not None:
            grammar = to_grammar(params.structured_outputs, strict=self.strict_json_schema)
            grammar_field = f"structured_outputs.{params.structured_outputs.kind}"
        if grammar is not None and self.tokenizer is None:
            raise ValueError(
                "structured_outputs need a tokenizer, and the engine runs without one (skip_tokenizer_init)"
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=self.complete_params(params, self.check_length(ids)),
            eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=salt,
            grammar=grammar,
            grammar_field=grammar_field or "structured_outputs",
            adapter=adapter,
            mm_items=items,
            boundaries=boundaries or None if truncate_prompt_tokens is None else None,
        )

    def process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        pooling: Pooling,
        *,
        pair: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        before: str = "",
    ) -> EngineCoreRequest:
        """Check a prompt that is to be pooled, or with ``pair`` two texts that are read together. Raises ValueError.

        ``truncate_prompt_tokens``: as in `process`; an encoder's text keeps what ends it for the model (as [SEP]), and
        by default its beginning (a decoder's its end). ``before`` is put before a text, not before token ids; its
        tokens are left out of pooling where the model's files say so.
        """
        side = truncation_side or ("right" if self.model.is_encoder else "left")
        if not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority must fit 32 bits (-2**31 to 2**31 - 1), got {priority}")
        limit = self._pooled_limit(truncate_prompt_tokens)
        features = self.images.process(data) if (data := _images_of(prompt)) else None
        if features and limit is not None:
            raise ValueError("truncate_prompt_tokens would cut images of the prompt; leave it out, or send text alone")
        text, ids, _ = _split_prompt(prompt)
        if text and before:
            text, pooling = before + text, self._behind_prompt(pooling, before, add_special_tokens, limit and side)
        types: list[int] | None = None
        if ids is not None:
            ids = self._check_ids(ids)
        elif pair is None and (limit is None or not self.model.is_encoder):
            ids = self.tokenize(text or "", add_special_tokens, limit, None)
        else:
            ids, types = self._tokenize_within(text or "", pair, limit, side, add_special_tokens)
        items = None
        if features:
            ids, items = self.images.place(ids, features)
        if limit is not None and len(ids) > limit:
            if side == "left":
                pooling = replace(pooling, left_out=max(0, pooling.left_out + limit - len(ids)))
            ids = ids[:limit] if side == "right" else ids[-limit:]
        self._check_pooled_length(len(ids))
        if pooling.left_out >= len(ids):
            raise ValueError(
                f"prompt has {len(ids)} tokens, and {pooling.left_out} of the prompt of the model's files are left out "
                "of pooling; send more text, or allow more tokens"
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=SamplingParams(max_tokens=1, seed=0, output_kind=RequestOutputKind.FINAL_ONLY),
            eos_token_ids=[],
            arrival_time=time.time(),
            priority=priority,
            pooling=pooling,
            token_types=types if self.has_token_types else None,
            mm_items=items,
        )

    def _behind_prompt(self, pooling: Pooling, before: str, special: bool, cut_side: str | int | None) -> Pooling:
        """Leave the tokens of ``before`` out where the model's files say so: as many as it has by itself, without what
        ends a text, as sentence-transformers counts them. ``cut_side``: see `process_pooling`. Raises ValueError."""
        if self.pooler.pools_prompt:
            return pooling
        if self.model.is_encoder and cut_side == "left":
            raise ValueError(
                "truncation_side must not cut beginnings: the prompt of the model's files is there, whose tokens are "
                "left out of pooling; cut the ends"
            )
        ids = self.tokenize(before, special)
        ends = bool(ids) and self.tokenizer is not None and ids[-1] in self.tokenizer.all_special_ids
        return replace(pooling, left_out=len(ids) - ends)

    def _pooled_limit(self, truncate_prompt_tokens: int | None) -> int | None:
        """Tokens that are kept of a prompt; None: all. Raises ValueError."""
        longest = self.longest_pooled
        limit = longest if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if limit is not None and not 1 <= limit <= longest:
            raise ValueError(
                f"truncate_prompt_tokens must be -1 or between 1 and {longest} (the longest text here), got {limit}"
            )
        return limit

    def _check_pooled_length(self, length: int) -> None:
        longest = self.longest_pooled
        if not length:
            raise ValueError("prompt must not be empty: it has no tokens; send at least one character or token id")
        if length > longest:
            flag = "max_model_len" if longest == self.max_model_len - self._room else "max_num_batched_tokens"
            raise ValueError(
                f"prompt has {length} tokens, but the model takes at most {longest} ({flag}); shorten it, or set "
                "truncate_prompt_tokens"
            )

    @property
    def longest_pooled(self) -> int:
        """Tokens of the longest prompt that can be pooled."""
        longest = self.max_model_len - self._room
        return min(longest, self.max_num_batched_tokens or longest) if self.model.is_encoder else longest

    @property
    def _room(self) -> int:
        """A decoder keeps a place for a token behind the prompt."""
        return 0 if self.model.is_encoder else 1

    def _tokenize_within(
        self, text: str, pair: str | None, limit: int | None, side: str, add_special_tokens: bool
    ) -> tuple[list[int], list[int]]:
        if self.tokenizer is None:
            raise ValueError(
                "prompt must be token ids, because the engine runs without a tokenizer (skip_tokenizer_init)"
            )
        for one in (text, pair or ""):  # what cannot fit is refused before it is tokenised
            if limit is None and len(one) // self._max_token_chars > self.longest_pooled:
                raise ValueError(
                    f"prompt has {len(one)} characters, and the model takes at most {self.longest_pooled} tokens; "
                    "shorten it, or set truncate_prompt_tokens"
                )
        try:
            return self.tokenizer.encode_pair(text, pair, limit, side, add_special_tokens)
        except TypeError:
            raise _not_unicode(text) from None

    # -- the prompt --------------------------------------------------------------------------------------------------

    def tokenize(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Token ids of a prompt; a text that cannot fit is refused before it is tokenised.

        With a ``cache_salt`` the token cache is not used: timing must not reveal what others have asked.
        """
        if self.tokenizer is None or self.prefix_tokens is None:
            raise ValueError(
                "prompt must be token ids, because the engine runs without a tokenizer (skip_tokenizer_init)"
            )
        if truncate_prompt_tokens is None and len(text) > self.max_model_len:
            at_least = len(text) // self._max_token_chars
            if at_least > self.max_model_len:
                raise ValueError(
                    f"prompt has {len(text)} characters, at least {at_least} tokens, but the model takes at most "
                    f"{self.max_model_len} tokens (max_model_len); shorten it"
                )
        try:
            encode = self.prefix_tokens.encode if cache_salt is None else self.tokenizer.encode
            ids = encode(text, add_special_tokens)
        except TypeError:  # raised by the tokenizer for text that UTF-8 cannot encode
            raise _not_unicode(text) from None
        if self._beyond and (unknown := self._beyond.keys() & set(ids)):
            raise ValueError(
                f"prompt has the token {self._beyond[min(unknown)]}, for which the model has no embedding; write it in "
                "another way"
            )
        return ids

    def predict(self, text: str) -> list[int] | None:
        """Token ids of a text that an answer may repeat, as many as an answer may have; None: there are none. Raises
        ValueError."""
        if self.tokenizer is None:
            raise ValueError("prediction needs the tokenizer, and the engine runs without one (skip_tokenizer_init)")
        ids = self.tokenizer.encode(text[: self.max_model_len * self._max_token_chars], add_special_tokens=False)
        return ids[: self.max_model_len] or None

    @cached_property
    def _max_token_chars(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length over this."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)

    def first_tokens(self, text: str, limit: int) -> str:
        """The beginning of ``text`` that has at most ``limit`` tokens. Raises ValueError."""
        if self.tokenizer is None:
            raise ValueError("texts cannot be cut to tokens, because the engine runs without a tokenizer")
        try:
            return self.tokenizer.first_tokens(text, limit)
        except TypeError:
            raise _not_unicode(text) from None

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        ids = list(ids)
        types = set(map(type, ids))
        if types - {int}:
            ids = [_as_int(value, i) for i, value in enumerate(ids)]
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(value for value in ids if not 0 <= value < self.vocab_size)
            raise ValueError(
                f"prompt_token_ids must be between 0 and {self.vocab_size - 1} (the model's vocabulary), got {bad} "
                f"at position {ids.index(bad)}"
            )
        return ids

    def _truncate(self, ids: list[int], limit: int | None, side: str) -> list[int]:
        if limit is None:
            return ids
        if limit < -1 or limit == 0 or limit > self.max_model_len - 1:
            raise ValueError(
                f"truncate_prompt_tokens must be -1 or between 1 and {self.max_model_len - 1} (max_model_len - 1), "
                f"got {limit}"
            )
        keep = self.max_model_len - 1 if limit == -1 else limit
        return ids[:keep] if side == "right" else ids[-keep:]

    def check_length(self, ids: list[int]) -> int:
        """Return how many tokens can follow the prompt; raises ValueError if it is empty or leaves no room for one."""
        if not ids:
            raise ValueError("prompt must not be empty: it has no tokens; send at least one character or token id")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"prompt has {len(ids)} tokens, but the model takes at most {self.max_model_len} tokens of prompt and "
                "answer together (max_model_len); shorten it, or set truncate_prompt_tokens"
            )
        return room

    # -- the parameters ----------------------------------------------------------------------------------------------

    def complete_params(self, params: SamplingParams, room: int) -> SamplingParams:
        """A copy with max_tokens, seed and bad words filled in; ``room`` limits max_tokens. Raises ValueError for what
        the model does not allow."""
        params.verify(self.vocab_size, self.max_logprobs)
        if params.stop and (self.tokenizer is None or not params.detokenize):
            raise ValueError("stop needs detokenize and a loaded tokenizer; enable both, or use stop_token_ids")
        params = params.clone()
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if params.seed is None:
            params.seed = secrets.randbits(63)
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words(params.bad_words)
        if params.dry_multiplier > 0:
            params.dry_breaker_token_ids, params.dry_breaker_sequences = self._breakers(params.dry_sequence_breakers)
        self._check_tokens_remain(params)
        return params

    def _check_tokens_remain(self, params: SamplingParams) -> None:
        """Raises ValueError when every allowed token is forbidden by another parameter."""
        allowed = set(params.allowed_token_ids or ())
        forbidden = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
        if params.min_tokens > 0:
            forbidden.update(params.stop_token_ids, [] if params.ignore_eos else self.eos_token_ids)
        if allowed and allowed <= forbidden:
            raise ValueError(
                "allowed_token_ids must leave at least one token, but bad_words and min_tokens forbid all of them; "
                "allow more, or remove those"
            )

    def _breakers(self, texts: list[str]) -> tuple[list[int], list[list[int]]]:
        """Tokens that hold one of the texts, and the tokens of those that no single one holds."""
        if self.tokenizer is None:
            if texts:
                raise ValueError(
                    "dry_sequence_breakers need the tokenizer, but the engine runs without one (skip_tokenizer_init): "
                    "give an empty list"
                )
            return [], []
        ids, sequences = set[int](), list[list[int]]()
        for text in texts:
            ids |= set(self._holding(text))
            sequence = self.tokenizer.encode(text, add_special_tokens=False)
            if len(sequence) > 1:
                sequences.append(sequence)
        return sorted(ids), sequences

    def _holding(self, text: str) -> list[int]:
        """Ids of the tokens whose text holds ``text``."""
        if (found := self._breaker_ids.get(text)) is None:
            found = [token for token, own in enumerate(self._token_texts) if text in own]
            if len(self._breaker_ids) < _MOST_BREAKERS:
                self._breaker_ids[text] = found
        return found

    @cached_property
    def _token_texts(self) -> list[str]:
        assert self.tokenizer is not None
        known = min(self.vocab_size, self.tokenizer.backend.get_vocab_size(with_added_tokens=True))
        return self.tokenizer.backend.decode_batch([[i] for i in range(known)], skip_special_tokens=False)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences to forbid: each word as it begins a text and as it follows a space."""
        if self.tokenizer is None:
            raise ValueError("bad_words needs the tokenizer, but the engine runs without one (skip_tokenizer_init)")
        sequences: list[list[int]] = []
        for word in words:
            stripped = word.strip()
            if not stripped:
                raise ValueError(f"bad_words must hold words with at least one visible character, got {word!r}")
            for variant in (stripped, " " + stripped):
                ids = self.tokenizer.encode(variant, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _split_prompt(prompt: Any) -> tuple[str | None, Sequence[int] | None, str | None]:
    """Text, token ids and cache salt of any form of prompt."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, dict):
        if prompt.get("prompt_token_ids") is not None:
            return prompt.get("prompt"), prompt["prompt_token_ids"], prompt.get("cache_salt")
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], None, prompt.get("cache_salt")
        raise ValueError(f'prompt must have "prompt" (a text) or "prompt_token_ids", got the keys {sorted(prompt)}')
    if isinstance(prompt, Sequence) or hasattr(prompt, "__iter__"):
        return None, prompt, None
    raise ValueError(f"prompt must be a text, a list of token ids or a dict, got {type(prompt).__name__}")


def _boundaries_of(prompt: Any, num_tokens: int) -> list[int] | None:
    """Positions in a prompt of ``num_tokens`` after which others may go on differently, ascending."""
    given = prompt.get("boundaries") if isinstance(prompt, dict) else None
    return sorted({int(i) for i in given if 0 < i < num_tokens}) if given else None


def text_of_prompt(prompt: Any) -> str | None:
    """The text of a prompt; None for one of token ids."""
    return prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None


def _images_of(prompt: Any) -> Any:
    return prompt.get("multi_modal_data") if isinstance(prompt, dict) else None


def _not_unicode(text: str) -> ValueError:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} is the lone surrogate {text[error.start]!a}"
        return ValueError(f"prompt must be valid Unicode, but {where}; remove it")
    return ValueError(f"prompt must be a text, got {type(text).__name__}")


def _as_int(value: Any, position: int) -> int:
    """An integer of any type (numpy's too), but no bool."""
    if not isinstance(value, bool):
        try:
            index: int = value.__index__()
            return index
        except AttributeError:
            pass
    raise ValueError(f"prompt_token_ids must hold integers, got {value!r} at position {position}")


def eos_token_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Ids that end the model's answers: those of generation_config.json (of config.json if that has none) and the
    tokenizer's."""
    found: list[int] = []
    sources = [config.model.generation_config.get("eos_token_id")]
    if sources == [None]:
        sources = [config.model.text.eos_token_id]
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        for token_id in source if isinstance(source, list) else [source]:
            if isinstance(token_id, int) and token_id not in found:
                found.append(token_id)
    return found
