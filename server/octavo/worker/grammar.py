"""Grammars of running sequences: each compiled once, one matcher a sequence, masks filled while the model computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.config import ModelConfig
from octavo.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 256


class GrammarCompiler:
    """Compiles in threads of its own; llguidance leaves the GIL meanwhile and bounds its own work."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def prepare(self, grammar: str) -> Future[None]:
        """Start compiling; the future carries a ValueError when the grammar cannot be used with this tokenizer."""
        return self._threads.submit(self._prepare, grammar)

    def _prepare(self, grammar: str) -> None:
        self.matcher(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar, the caller's own."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar].deep_copy()
            from llguidance import LLMatcher

            matcher = LLMatcher(self._load_tokenizer(), grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(f"the grammar cannot be compiled: {' '.join(matcher.get_error().split())[:500]}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            from octavo.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_files(self._config.files)
            if tokenizer.eos_token_id is None:
                raise ModelError("structured outputs need a tokenizer with an end-of-sequence token")
            self._tokenizer = LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=self._config.vocab_size, eos_token=[tokenizer.eos_token_id]
            )
        return self._tokenizer


class SequenceGrammars:
    """The matchers of sequences that have a row, and the bitmask of each step."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._words = -(-vocab_size // 32)
        self._matchers: dict[str, LLMatcher] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="bitmask")

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, req_id: str, grammar: str, output_token_ids: Sequence[int]) -> None:
        """``output_token_ids``: what a sequence that comes back after a preemption has already."""
        matcher = self._compiler.matcher(grammar)
        matcher.consume_tokens(list(output_token_ids))
        self._matchers[req_id] = matcher

    def remove(self, req_id: str) -> None:
        self._matchers.pop(req_id, None)

    def start_fill(self, req_ids: list[str]) -> Callable[[], torch.Tensor | None]:
        """Begin the step's bitmask int32 [R, ceil(V / 32)]; the result waits for it (None: nobody is constrained)."""
        constrained = [(i, self._matchers[req_id]) for i, req_id in enumerate(req_ids) if req_id in self._matchers]
        if not constrained:
            return lambda: None
        mask = np.full((len(req_ids), self._words), -1, dtype=np.int32)
        done = self._threads.submit(self._fill, mask, constrained)

        def result() -> torch.Tensor:
            done.result()
            return torch.from_numpy(mask)

        return result

    def _fill(self, mask: np.ndarray, constrained: list[tuple[int, LLMatcher]]) -> None:
        for i, matcher in constrained:
            if matcher.is_error():
                mask[i] = 0  # nothing may follow: the request ends with an error
            else:
                matcher.unsafe_compute_mask_ptr(mask[i].ctypes.data, mask[i].nbytes)

    def accept(self, req_id: str, token_id: int) -> str | None:
        """Advance a sequence; returns why it cannot go on, if so. Tokens after the grammar's end change nothing."""
        matcher = self._matchers.get(req_id)
        if matcher is None or (matcher.is_stopped() and not matcher.is_error()):
            return None
        if not matcher.consume_token(token_id) or matcher.is_error():
            return f"the grammar went wrong: {' '.join(matcher.get_error().split())[:300]}"
        return None
