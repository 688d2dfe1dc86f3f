"""The load line of the log: throughput, queue and cache usage, every ten seconds with work."""

from __future__ import annotations

import asyncio
import logging
import time

from octavo.interface.messages import SchedulerStats, SpecDecodeStats
from octavo.metrics.stats import IterationStats

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0


class LoadLog:
    """Logs the load line. Its timer runs only after a step: an idle engine logs one last line, then nothing."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._last = SchedulerStats()
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._prompt_tokens = self._generation_tokens = self._queries = self._hits = self._preemptions = 0
        self._without_state = 0
        self._spec_decode = SpecDecodeStats()

    def record(self, stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add one step; called on the event loop."""
        if self._timer is None:
            self._reset()
            self._timer = asyncio.get_running_loop().call_later(PERIOD_SECONDS, self._log)
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        if stats is not None:
            self._last = stats
            self._queries += stats.prefix_cache_queries
            self._hits += stats.prefix_cache_hits
            self._preemptions += stats.num_preemptions
            if stats.states is not None:
                self._without_state += stats.states.num_tokens_without_state
            if stats.spec_decode is not None:
                self._spec_decode.add(stats.spec_decode)

    def _log(self) -> None:
        seconds = time.monotonic() - self._since
        last, hit_rate = self._last, self._hits / self._queries if self._queries else 0.0
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s; running %d, waiting %d; KV cache %.1f %% used, "
            "prefix cache hits %.1f %%%s, preemptions %d%s",
            self._prompt_tokens / seconds,
            self._generation_tokens / seconds,
            last.num_running_reqs,
            last.num_waiting_reqs,
            100 * last.kv_cache_usage,
            100 * hit_rate,
            _states_line(self._without_state, self._queries),
            self._preemptions,
            _drafts_line(self._spec_decode),
        )
        self._timer = None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


def _states_line(without_state: int, queries: int) -> str:
    """Name the share that a model with recurrent layers could hit besides, if it is much."""
    if without_state <= 0.05 * queries:
        return ""
    return f" ({100 * without_state / queries:.1f} % more were cached, but no state)"


def _drafts_line(stats: SpecDecodeStats) -> str:
    """Tokens per step count sequences with drafts alone: one token, and the accepted drafts."""
    if not stats.num_draft_tokens:
        return ""
    accepted = stats.num_accepted_tokens
    share, tokens = 100 * accepted / stats.num_draft_tokens, 1 + accepted / stats.num_drafts
    return f", drafts accepted {share:.1f} % ({tokens:.2f} tokens per step)"
