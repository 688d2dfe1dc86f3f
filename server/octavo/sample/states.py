"""Sampling state of running requests: one row a request, kept on the CPU, token histories on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import octavo_kernels
from octavo.interface.sampling_params import SamplingParams
from octavo.sample import devices
from octavo.sample.constraints import pack_bitmask
from octavo.sample.gumbel import position_keys, stream_key
from octavo.sample.metadata import (
    ApartRows,
    BadWords,
    ExcludingRows,
    NamedTokens,
    Penalties,
    RandomRows,
    RowBitmask,
    SamplingMetadata,
    TokenAppend,
    TokenLogits,
)
from octavo.sample.shaped_rows import ShapedRows
from octavo.sample.token_pool import TokenPool
from octavo_kernels import SamplingRows, SamplingTable, cpu

MAX_TEMPERATURE = 1e30  # float32 keeps -inf / T = -inf


@dataclass
class _Row:
    """A request's parameters that are lists; empty for most requests."""

    stop_token_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    allowed: Tensor | None = None  # int32 bitmask
    bad_words: list[list[int]] = field(default_factory=list)
    named: NDArray[np.int64] | None = None  # tokens whose log-probabilities are wanted
    kept: tuple[NDArray[np.generic], ...] = ()  # what the C kernel reads by address


class RowsDraw:
    """A draw of given rows, whose logits are still to come."""

    def __init__(
        self,
        drawing: cpu.Drawing,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        pool: tuple[Tensor, Tensor, Tensor] | None,
        columns: int,
        known: NDArray[np.int64] | None,
    ) -> None:
        """For the arguments see `octavo_kernels.cpu.Drawing.pack`."""
        self._drawing, self._rows, self._rest = drawing, rows, (None, pool, columns, known)
        self._positions = positions

    def pack(self, logits: Tensor, best: cpu.Best) -> bytes:
        """The operation that draws, to follow on those that fill the first rows of ``logits`` and ``best``."""
        return self._drawing.pack(logits, self._rows, self._positions, best, *self._rest)

    def read(self) -> cpu.Drawn:
        """The tokens, once the operation has run."""
        return self._drawing.read()


class SamplingStates:
    """``max_num_reqs`` rows for a vocabulary. A request keeps its row from `add_request` to `remove_request`."""

    def __init__(
        self, max_num_reqs: int, vocab_size: int, device: torch.device | str = "cpu", use_kernels: bool = False
    ) -> None:
        """``use_kernels``: draw with octavo_kernels on a CPU too, as is always done elsewhere."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu" and octavo_kernels.backend_name(self.device) != "triton"
        self.uses_kernels = use_kernels or not on_cpu
        # True: `draw` may be called.
        self.draws = not self.uses_kernels and octavo_kernels.backend_name(self.device) == "cpu"
        self.draws &= cpu.unavailable_reason() is None
        self._requests = np.zeros(max_num_reqs, cpu.REQUEST)
        self._drawing = cpu.Drawing(self._requests, max_num_reqs) if self.draws else None
        self.pool = TokenPool(max_num_reqs, vocab_size, self.device, keep_seen=self.uses_kernels or self.draws)
        n = max_num_reqs
        # What the kernels read of a request, as one array, so that it is brought to the device in one copy.
        self._packed = np.zeros((5, n), np.int64)
        self._temperature = self._packed[0].view(np.float32)[:n]
        self._top_k = self._packed[1]
        self._top_p = self._packed[2].view(np.float64)
        self._top_p[:] = 1
        self._min_p = self._packed[3].view(np.float64)
        self._stream = self._packed[4].view(np.uint64)
        self._on_device = torch.zeros(5, n, dtype=torch.int64, device=self.device)
        self._table_changed = True
        self._repetition = np.ones(n, np.float32)
        self._frequency = np.zeros(n, np.float32)
        self._presence = np.zeros(n, np.float32)
        self._prompt_len = np.zeros(n, np.int64)
        self._min_position = np.zeros(n, np.int64)  # below it EOS and stop ids are held back
        self._num_logprobs = np.full(n, -1, np.int64)  # -1: none
        self._beyond_draw = np.zeros(n, np.bool_)
        self._shaped = ShapedRows(n, vocab_size, self.device)
        self._slot = np.full(n, -1, np.int64)
        self._count_slot = np.full(n, -1, np.int64)
        self._rows: list[_Row | None] = [None] * n
        self._beyond_best = np.zeros(n, np.int64)  # below that position, sampling is more than taking the best token
        self._any_beyond_best, self._any_history, self._most_logprobs = False, False, -1  # of all requests here
        self._any_beyond_draw = False
        self._cached_rows: list[int] = []
        self._cached: SamplingMetadata | None = None
        self._steady_from: float = 0  # what is cached holds where all positions are at least this

    def add_request(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: frozenset[int],
        sample_index: int,
        default_seed: int,
    ) -> None:
        """Occupy a free row, also with a sequence that comes back after a preemption (``output_token_ids``).

        ``stop_token_ids``: EOS and the request's own, held back until min_tokens. ``default_seed`` is used when
        ``params.seed`` is None. Raises ValueError for a taken row or for token ids outside the vocabulary.
        """
        if self._rows[row] is not None:
            raise ValueError(f"row {row} is taken")
        p, vocab = params, self.vocab_size
        penalised = p.frequency_penalty != 0 or p.presence_penalty != 0
        prefixed = any(len(word) > 1 for word in p.bad_words_token_ids)
        bias = p.logit_bias or {}
        state = _Row(
            self._checked(sorted(stop_token_ids), "stop_token_ids", keep_known=True),
            self._checked(list(bias), "logit_bias"),
            np.fromiter(bias.values(), np.float32, len(bias)),
            bad_words=p.bad_words_token_ids,
        )
        for word in p.bad_words_token_ids:
            self._checked(word, "bad_words")
        if p.allowed_token_ids is not None:
            ids = self._checked(p.allowed_token_ids, "allowed_token_ids")
            state.allowed = devices.put(pack_bitmask(torch.from_numpy(ids), vocab), self.device)
        if p.logprob_token_ids is not None:
            state.named = self._checked(p.logprob_token_ids, "logprob_token_ids")
        slots = -1, -1
        self._shaped.add(row, p)
        self._beyond_draw[row] = state.named is not None or p.shapes_logits
        if penalised or prefixed or p.repetition_penalty != 1 or p.dry_multiplier > 0:
            prompt = self._checked(prompt_token_ids, "prompt_token_ids")
            output = self._checked(output_token_ids, "output_token_ids")
            slots = self.pool.add(torch.from_numpy(prompt), torch.from_numpy(output), count=penalised)
        self._slot[row], self._count_slot[row] = slots
        self._temperature[row] = 0 if p.greedy else min(p.temperature, MAX_TEMPERATURE)
        self._top_k[row] = vocab if p.top_k < 1 else min(p.top_k, vocab)
        self._top_p[row] = p.top_p
        self._min_p[row] = p.min_p
        self._repetition[row] = p.repetition_penalty
        self._frequency[row] = p.frequency_penalty
        self._presence[row] = p.presence_penalty
        self._stream[row] = stream_key(default_seed if p.seed is None else p.seed, sample_index)
        self._prompt_len[row] = len(prompt_token_ids)
        self._min_position[row] = len(prompt_token_ids) + p.min_tokens if len(state.stop_token_ids) else 0
        self._num_logprobs[row] = -1 if p.logprobs is None else (vocab if p.logprobs < 0 else min(p.logprobs, vocab))
        self._rows[row] = state
        self._fill_request(row, state)
        self._cached = None
        self._table_changed = True

    def _fill_request(self, row: int, state: _Row) -> None:
        """Fill in what the C kernel reads of a request."""
        request = self._requests[row]
        for name, column in (
            ("temperature", self._temperature),
            ("top_p", self._top_p),
            ("min_p", self._min_p),
            ("repetition", self._repetition),
            ("frequency", self._frequency),
            ("presence", self._presence),
            ("top_k", self._top_k),
            ("stream", self._stream),
            ("num_prompt", self._prompt_len),
            ("min_position", self._min_position),
            ("slot", self._slot),
            ("count_slot", self._count_slot),
            ("num_logprobs", self._num_logprobs),
        ):
            request[name] = column[row]
        words = [token for word in state.bad_words for token in (len(word), *word)]
        stops, bias, bad = (np.asarray(ids, np.int32) for ids in (state.stop_token_ids, state.bias_ids, words))
        state.kept = stops, bias, bad
        request["stops"], request["num_stops"] = stops.ctypes.data, len(stops)
        request["bias_ids"], request["num_bias"] = bias.ctypes.data, len(bias)
        request["bias_values"] = state.bias_values.ctypes.data
        request["bad_words"], request["bad_words_size"] = bad.ctypes.data, len(bad)
        request["allowed"] = 0 if state.allowed is None or not self.draws else state.allowed.data_ptr()
        is_plain = (
            self._temperature[row] == 0
            and self._repetition[row] == 1
            and self._slot[row] < 0
            and not (len(bias) or len(bad) or state.allowed is not None or self._num_logprobs[row] >= 0)
        )
        self._beyond_best[row] = self._min_position[row] if is_plain else np.iinfo(np.int64).max
        self._summarise()

    def _summarise(self) -> None:
        self._any_beyond_best = bool(self._beyond_best.any())
        self._any_history = bool((self._slot >= 0).any())
        self._most_logprobs = int(self._num_logprobs.max(initial=-1))
        self._any_beyond_draw = bool(self._beyond_draw.any())

    def needs_sampler(self, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return True for each of these rows that wants what `draw` does not know: the log-probabilities of given
        tokens, or a distribution of another shape. None: none does."""
        if not self._any_beyond_draw:
            return None
        wanted: NDArray[np.bool_] = self._beyond_draw[rows]
        return wanted if wanted.any() else None

    def is_greedy_only(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """True if each row takes its best token as the logits stand, and nothing else is asked for; for the arguments
        see `make_metadata`."""
        return not (self._any_beyond_best and (positions < self._beyond_best[rows]).any())

    def draw(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        best: cpu.Best | None = None,
        bitmask: Tensor | None = None,
        known: NDArray[np.int64] | None = None,
    ) -> cpu.Drawn:
        """Draw the tokens of `Sampler` for these rows, in one call; see `octavo_kernels.cpu.Drawing`."""
        assert self._drawing is not None
        return self._drawing.draw(logits, rows, positions, best, bitmask, *self._wanted(rows, positions, known))

    def step_draw(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], known: NDArray[np.int64] | None = None
    ) -> RowsDraw:
        """`draw` as a part of the program of these rows' step, which is to be replayed next."""
        assert self._drawing is not None
        return RowsDraw(self._drawing, rows, positions, *self._wanted(rows, positions, known))

    def _wanted(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], known: NDArray[np.int64] | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor] | None, int, NDArray[np.int64] | None]:
        pool, in_use = self.pool, None
        if self._any_history:
            if known is None:
                pool.reserve(int(positions[self._slot[rows] >= 0].max(initial=0)) + 1)
            assert pool.seen is not None
            in_use = pool.history, pool.seen, pool.counts
        return in_use, self._most_logprobs + 1 if known is None else 0, known

    def remove_request(self, row: int) -> None:
        """Free a row; a free one stays as it is."""
        if self._rows[row] is None:
            return
        if self._slot[row] >= 0:
            self.pool.remove(int(self._slot[row]), int(self._count_slot[row]))
            self._slot[row] = self._count_slot[row] = -1
        self._rows[row] = None
        self._shaped.remove(row)
        self._cached = None
        self._beyond_best[row], self._num_logprobs[row], self._beyond_draw[row] = 0, -1, False
        self._summarise()

    def min_position(self, row: int) -> int:
        """The first position at which the row may stop: below it, tokens are held back. 0: none ever is."""
        return int(self._min_position[row])

    def make_metadata(self, rows: Sequence[int], positions: Sequence[int]) -> SamplingMetadata:
        """Gather a step. ``positions[i]``: absolute position of the token that row ``rows[i]`` is about to get.

        What is returned may be returned again, and is not to be changed."""
        rows, at = list(rows), np.asarray(positions, np.int64)
        if self._cached is None or rows != self._cached_rows:
            self._cached, self._cached_rows = self._gather(rows, self.uses_kernels), rows
            self._steady_from = self._find_steady(self._cached, rows)
        if min(positions, default=0) >= self._steady_from:
            return self._cached
        return self._at_positions(self._cached, np.asarray(rows, np.int64), at)

    # What depends on the rows alone, kept while the batch stays the same.
    def _gather(self, rows: list[int], by_kernels: bool) -> SamplingMetadata:
        r = np.asarray(rows, np.int64)
        out = SamplingMetadata(num_rows=len(rows), pool=self.pool)
        random = self._temperature[r] > 0
        cut = (self._top_k[r] < self.vocab_size) | (self._top_p[r] < 1) | (self._min_p[r] > 0)
        if by_kernels:
            index = self._put(r)
            out.kernel_rows = SamplingRows(self.table(), index, index, truncated=bool((random & cut).any()))
            if (apart := np.flatnonzero(self._shaped.any[r])).size:
                out.apart = ApartRows(self._put(apart), self._gather(r[apart].tolist(), by_kernels=False))
        else:
            self._draws(out, r, random, cut)
        states = [self._rows[row] for row in rows]
        if any(state is None for state in states):
            raise ValueError("a row without a request was asked to sample")
        if allowed := [(i, s.allowed) for i, s in enumerate(states) if s is not None and s.allowed is not None]:
            index = self._put(np.array([i for i, _ in allowed]))
            out.allowed = RowBitmask(index, torch.stack([mask for _, mask in allowed]))
        if biased := [(i, s) for i, s in enumerate(states) if s is not None and s.bias_ids.size]:
            out.logit_bias = TokenLogits(
                self._put(np.repeat([i for i, _ in biased], [s.bias_ids.size for _, s in biased])),
                self._put(np.concatenate([s.bias_ids for _, s in biased])),
                self._put(np.concatenate([s.bias_values for _, s in biased])),
            )
        if words := [(i, w) for i, s in enumerate(states) if s is not None for w in s.bad_words]:
            out.bad_words = self._bad_words(r, words)
        wants = self._num_logprobs[r] >= 0
        if wants.any():
            out.logprobs_rows = self._put(np.flatnonzero(wants))
            out.num_logprobs = int(self._num_logprobs[r].max())
            out.named = self._named([states[i] for i in np.flatnonzero(wants)])
        return out

    def _named(self, states: Sequence[_Row | None]) -> NamedTokens | None:
        """Gather the tokens that the rows with log-probabilities name."""
        named = [(i, s.named) for i, s in enumerate(states) if s is not None and s.named is not None]
        if not named:
            return None
        return NamedTokens(
            self._put(np.repeat([i for i, _ in named], [len(ids) for _, ids in named])),
            self._put(np.concatenate([np.arange(1, len(ids) + 1) for _, ids in named])),
            self._put(np.concatenate([ids for _, ids in named])),
        )

    def _draws(
        self, out: SamplingMetadata, r: NDArray[np.int64], random: NDArray[np.bool_], cut: NDArray[np.bool_]
    ) -> None:
        if not random.all():
            out.greedy_rows = self._put(np.flatnonzero(~random))
        excludes = random & (self._shaped.probability[r] > 0)
        random = random & ~excludes
        if (plain := np.flatnonzero(random & ~cut)).size:
            out.plain = self._random_rows(r, plain)
        if (cuts := np.flatnonzero(random & cut)).size:
            out.truncated = self._truncated_rows(r, cuts)
        if (some := np.flatnonzero(excludes)).size:
            thresholds = self._put(self._shaped.threshold[r[some]][:, None])
            out.excluding = ExcludingRows(self._truncated_rows(r, some), thresholds, torch.empty(0, dtype=torch.bool))
        if (sigmas := np.flatnonzero(self._shaped.sigma[r] > 0)).size:
            out.sigma = self._put(sigmas), self._put(self._shaped.sigma[r[sigmas]][:, None])

    def table(self) -> SamplingTable:
        """Every row's parameters on the device, for kernels: always the same tensors, up to date with this call."""
        if self._table_changed:
            # A copy of its own: the host may change the array before the device has read it.
            self._on_device.copy_(self._put(self._packed), non_blocking=True)
            self._table_changed = False
        temperature, top_k, top_p, min_p, streams = self._on_device.unbind()
        return SamplingTable(
            temperature=temperature.view(torch.float32)[: top_k.shape[0]],
            top_k=top_k,
            top_p=top_p.view(torch.float64),
            min_p=min_p.view(torch.float64),
            streams=streams,
        )

    def _random_rows(self, r: NDArray[np.int64], index: NDArray[np.int64]) -> RandomRows:
        keys = torch.empty(0, 2, dtype=torch.int32)
        return RandomRows(self._put(index), self._put(self._temperature[r[index]][:, None]), keys)

    def _truncated_rows(self, r: NDArray[np.int64], index: NDArray[np.int64]) -> RandomRows:
        own = r[index]
        cuts = {"top_k": self._top_k[own], "top_p": self._top_p[own], "min_p": self._min_p[own]}
        return replace(self._random_rows(r, index), **{name: self._put(cut) for name, cut in cuts.items()})

    def _bad_words(self, r: NDArray[np.int64], words: list[tuple[int, list[int]]]) -> BadWords:
        index = np.array([i for i, _ in words])
        width = max(len(word) for _, word in words) - 1
        prefix = np.array([[-1] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words], np.int32)
        nothing = torch.empty(0, dtype=torch.int64)
        return BadWords(
            rows=self._put(index),
            slots=self._put(np.maximum(self._slot[r[index]], 0)),
            prefix=self._put(prefix.reshape(len(words), width)),
            prefix_len=self._put(np.array([len(word) - 1 for _, word in words])),
            last=self._put(np.array([word[-1] for _, word in words])),
            positions=nothing,
            prompt_len=self._put(self._prompt_len[r[index]]),
        )

    def _find_steady(self, gathered: SamplingMetadata, rows: list[int]) -> float:
        """The position from which on nothing of `_at_positions` concerns these rows; infinity: there is none."""
        every_token = (
            gathered.kernel_rows,
            gathered.plain,
            gathered.truncated,
            gathered.excluding,
            gathered.bad_words,
        )
        tracked = (self._slot[rows] >= 0) | (self._repetition[rows] != 1) | (self._count_slot[rows] >= 0)
        if tracked.any() or any(part is not None for part in every_token):
            return float("inf")
        return float(self._min_position[rows].max(initial=0))

    # What changes with every token.
    def _at_positions(self, base: SamplingMetadata, r: NDArray[np.int64], at: NDArray[np.int64]) -> SamplingMetadata:
        out = replace(base)
        if base.kernel_rows is not None:
            out.kernel_rows = replace(base.kernel_rows, positions=self._put(at))
        if base.plain is not None or base.truncated is not None or base.excluding is not None:
            keys = self._put(position_keys(self._stream[r], at))
            if base.plain is not None:
                out.plain = replace(base.plain, keys=keys[base.plain.rows])
            if base.truncated is not None:
                out.truncated = replace(base.truncated, keys=keys[base.truncated.rows])
            if base.excluding is not None:
                rows = replace(base.excluding.rows, keys=keys[base.excluding.rows.rows])
                applies = self._shaped.applies(r, self._stream[r], at)[rows.rows]
                out.excluding = replace(base.excluding, rows=rows, applies=applies)
        if base.kernel_rows is None:
            out.repeated = self._shaped.repeated(r, self._slot[r], at)
        if base.apart is not None:
            which = np.flatnonzero(self._shaped.any[r])
            out.apart = replace(base.apart, metadata=self._at_positions(base.apart.metadata, r[which], at[which]))
        if base.bad_words is not None:
            out.bad_words = replace(base.bad_words, positions=self._put(at)[base.bad_words.rows])
        if (early := np.flatnonzero(at < self._min_position[r])).size:
            stops = [row.stop_token_ids for i in early if (row := self._rows[r[i]]) is not None]
            out.min_tokens = TokenLogits(
                self._put(np.repeat(early, [len(ids) for ids in stops])), self._put(np.concatenate(stops))
            )
        keeps = self._slot[r] >= 0
        if base.apart is not None:
            keeps &= ~self._shaped.any[r]
        if (tracked := np.flatnonzero(keeps)).size:
            self.pool.reserve(int(at[tracked].max()) + 1)
            counted = np.flatnonzero(keeps & (self._count_slot[r] >= 0))
            out.append = TokenAppend(
                rows=self._put(tracked),
                slots=self._put(self._slot[r[tracked]]),
                positions=self._put(at[tracked]),
                count_rows=self._put(counted) if counted.size else None,
                count_slots=self._put(self._count_slot[r[counted]]) if counted.size else None,
            )
        out.penalties = self._penalties(r, at)
        return out

    def _penalties(self, r: NDArray[np.int64], at: NDArray[np.int64]) -> Penalties | None:
        penalised = np.flatnonzero((self._repetition[r] != 1) | (self._count_slot[r] >= 0))
        if not penalised.size:
            return None
        row = r[penalised]
        return Penalties(
            rows=self._put(penalised),
            slots=self._put(self._slot[row]),
            count_slots=self._put(self._count_slot[row]),
            positions=self._put(at[penalised]),
            max_position=int(at[penalised].max()),
            repetition=self._put(self._repetition[row][:, None]),
            frequency=self._put(self._frequency[row][:, None]),
            presence=self._put(self._presence[row][:, None]),
            any_counts=bool((self._count_slot[row] >= 0).any()),
        )

    def _put(self, array: NDArray) -> Tensor:  # type: ignore[type-arg]
        return devices.put(array, self.device)

    def _checked(self, ids: Sequence[int], name: str, keep_known: bool = False) -> NDArray[np.int64]:
        """Return ``ids`` as an array. Raises ValueError for ids outside the vocabulary; ``keep_known`` drops them."""
        array = np.asarray(ids, np.int64)
        known = (array >= 0) & (array < self.vocab_size)
        if keep_known:
            return array[known]
        if not known.all():
            raise ValueError(f"{name} holds token id {array[~known][0]}, outside the vocabulary of {self.vocab_size}")
        return array
