"""One sampling step over a batch. The order of operations is vLLM v1's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import octavo_kernels
from octavo.sample import devices
from octavo.sample.constraints import (
    apply_allowed,
    apply_bad_words,
    apply_bitmask,
    apply_logit_bias,
    apply_min_tokens,
    gather_constraints,
)
from octavo.sample.gumbel import GumbelNoise
from octavo.sample.logprobs import LogprobsTensors, gather_logprobs
from octavo.sample.metadata import (
    ApartRows,
    ExcludingRows,
    NamedTokens,
    Penalties,
    RandomRows,
    SamplerOutput,
    SamplingMetadata,
    TokenAppend,
    take_rows,
)
from octavo.sample.shaping import apply_repetition, apply_sigma, without_top_choices
from octavo.sample.token_pool import TokenPool
from octavo.sample.truncation import Cuts, kept_tokens, sample_truncated
from octavo_kernels import cpu


def apply_penalties(logits: Tensor, penalties: Penalties, pool: TokenPool) -> None:
    """Apply penalties in place to float32 [R, V].

    The repetition penalty counts prompt and output tokens, the other two count output tokens only.
    """
    seen = pool.history[penalties.slots, : penalties.max_position].long()
    columns = torch.arange(penalties.max_position, device=logits.device)
    # Beyond a row's own length: its first token again, which changes nothing.
    seen = torch.where(columns < penalties.positions[:, None], seen, seen[:, :1])
    flat = penalties.rows[:, None] * logits.shape[1] + seen
    values = logits.view(-1)[flat]
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    if penalties.any_counts:
        counts = pool.counts[penalties.count_slots[:, None].clamp(min=0), seen]
        counts = torch.where(penalties.count_slots[:, None] >= 0, counts, 0)
        values = values - penalties.frequency * counts - penalties.presence * (counts > 0)
    logits.view(-1)[flat] = values  # a token seen twice is written twice with the same value


def append_tokens(sampled: Tensor, append: TokenAppend, pool: TokenPool) -> None:
    """Append the sampled tokens (int64 [R]) of the rows that keep a history."""
    pool.history[append.slots, append.positions] = sampled[append.rows].to(torch.int32)
    if pool.seen is not None:
        tokens = sampled[append.rows]
        at = append.slots, tokens >> 5
        pool.seen[at] |= (1 << (tokens & 31)).to(torch.int32)
    if append.count_rows is not None:
        pool.counts[append.count_slots, sampled[append.count_rows]] += 1


class Sampler:
    """Raw logprobs; grammar, allowed tokens, bad words, min_tokens, logit_bias; penalties; DRY; top-n-sigma; greedy or
    temperature; min-p, top-k, top-p; XTC; the draw. Stateless but for the hashed token ids of its vocabulary."""

    def __init__(self) -> None:
        self._noise: GumbelNoise | None = None

    def __call__(self, logits: Tensor, metadata: SamplingMetadata, best: cpu.Best | None = None) -> SamplerOutput:
        """``logits`` [R, V], overwritten when float32 on a CPU; row i belongs to row i of ``metadata``. ``best``: their
        best ids and logits, as `cpu.argmax` has them, where they are known."""
        with torch.inference_mode():
            return self._forward(logits, metadata, best)

    def _forward(self, logits: Tensor, metadata: SamplingMetadata, best: cpu.Best | None) -> SamplerOutput:
        if metadata.kernel_rows is not None:
            return self._forward_kernels(logits, metadata)
        logits = logits.float().contiguous()
        raw = None
        if metadata.logprobs_rows is not None:
            raw = take_rows(logits, metadata.logprobs_rows).log_softmax(-1)
        if metadata.changes_logits:
            self._process(logits, metadata)
            best = None
        if metadata.plain is None and metadata.truncated is None and metadata.excluding is None:
            sampled, highest = best[:2] if best else _argmax(logits)
        else:
            sampled, highest = self._sample(logits, metadata), best[1] if best else logits.amax(-1)
        invalid = ~torch.isfinite(highest)
        if metadata.append is not None:
            append_tokens(sampled, metadata.append, metadata.pool)
        logprobs = None if raw is None else self._logprobs(raw, sampled, metadata)
        return SamplerOutput(sampled, invalid, logprobs)

    def _forward_kernels(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        assert metadata.kernel_rows is not None
        rows = replace(metadata.kernel_rows, constraints=gather_constraints(metadata))
        apart = None if metadata.apart is None else self._draw_apart(logits, metadata.apart, metadata.grammar_bitmask)
        drawn = octavo_kernels.sample(logits, rows)
        if metadata.append is not None:
            append_tokens(drawn.token_ids, metadata.append, metadata.pool)
        logprobs = None
        if metadata.logprobs_rows is not None:
            assert metadata.num_logprobs is not None
            wanted = metadata.logprobs_rows
            found = octavo_kernels.top_logprobs(logits, wanted, drawn.token_ids[wanted], metadata.num_logprobs)
            tensors = LogprobsTensors(*found)
            if metadata.named is not None:
                raw = logits.index_select(0, wanted).float().log_softmax(-1)
                tensors = name_logprobs(tensors, raw, metadata.named)
            logprobs = _spread(tensors, metadata)
        out = SamplerOutput(drawn.token_ids, drawn.invalid, logprobs)
        if metadata.apart is not None and apart is not None:
            _replace_rows(out, metadata.apart.rows, apart)
        return out

    def _draw_apart(self, logits: Tensor, apart: ApartRows, bitmask: Tensor | None) -> SamplerOutput:
        bitmask = None if bitmask is None else bitmask[apart.rows]
        return self._forward(logits[apart.rows], replace(apart.metadata, grammar_bitmask=bitmask), None)

    def _process(self, logits: Tensor, metadata: SamplingMetadata) -> None:
        if metadata.grammar_bitmask is not None:
            apply_bitmask(logits, metadata.grammar_bitmask)
        if metadata.allowed is not None:
            apply_allowed(logits, metadata.allowed)
        if metadata.bad_words is not None:
            apply_bad_words(logits, metadata.bad_words, metadata.pool)
        if metadata.min_tokens is not None:
            apply_min_tokens(logits, metadata.min_tokens)
        if metadata.logit_bias is not None:
            apply_logit_bias(logits, metadata.logit_bias)
        if metadata.penalties is not None:
            apply_penalties(logits, metadata.penalties, metadata.pool)
        if metadata.repeated is not None:
            apply_repetition(logits, metadata.repeated, metadata.pool)
        if metadata.sigma is not None:
            apply_sigma(logits, *metadata.sigma)

    def _sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        greedy, plain, truncated = metadata.greedy_rows, metadata.plain, metadata.truncated
        if self._noise is None:
            self._noise = GumbelNoise(logits.shape[1], logits.device)
        sampled = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        if greedy is not None:
            sampled[greedy] = _argmax(take_rows(logits, greedy))[0]
        if plain is not None:
            sampled[plain.rows] = self._noise.argmax(_scores(logits, plain), plain.keys)
        if truncated is not None:
            sampled[truncated.rows] = sample_truncated(_scores(logits, truncated), truncated, self._noise)
        if metadata.excluding is not None:
            sampled[metadata.excluding.rows.rows] = self._sample_excluding(logits, metadata.excluding, self._noise)
        return sampled

    @staticmethod
    def _sample_excluding(logits: Tensor, excluding: ExcludingRows, noise: GumbelNoise) -> Tensor:
        rows = excluding.rows
        scores = _scores(logits, rows)
        keep = kept_tokens(scores, Cuts.of(scores, rows))[0]
        own = take_rows(logits, rows.rows)
        keep = without_top_choices(own, keep, excluding.thresholds, excluding.applies)
        return noise.argmax(scores.masked_fill(~keep, -torch.inf), rows.keys)

    def _logprobs(self, raw: Tensor, sampled: Tensor, metadata: SamplingMetadata) -> LogprobsTensors:
        rows, k = metadata.logprobs_rows, metadata.num_logprobs
        assert rows is not None and k is not None
        found = gather_logprobs(raw, sampled[rows], k)
        return _spread(found if metadata.named is None else name_logprobs(found, raw, metadata.named), metadata)


def name_logprobs(found: LogprobsTensors, raw: Tensor, named: NamedTokens) -> LogprobsTensors:
    """Put the named tokens in place of the most likely ones. ``raw`` [W, V]: all log-probabilities of these rows."""
    ids, values = found.token_ids.clone(), found.logprobs.clone()
    at = named.places, named.columns
    ids[at] = named.token_ids.to(ids.dtype)
    values[at] = raw[named.places, named.token_ids]
    return LogprobsTensors(ids, values, found.ranks)


def _replace_rows(out: SamplerOutput, rows: Tensor, by: SamplerOutput) -> None:
    """Put what was drawn of ``rows`` int64 [N] alone in place of what is there."""
    out.sampled_token_ids[rows] = by.sampled_token_ids.to(out.sampled_token_ids.dtype)
    out.invalid[rows] = by.invalid
    if out.logprobs is not None and by.logprobs is not None:
        columns = by.logprobs.token_ids.shape[1]
        out.logprobs.token_ids[rows, :columns] = by.logprobs.token_ids.to(out.logprobs.token_ids.dtype)
        out.logprobs.logprobs[rows, :columns] = by.logprobs.logprobs
        out.logprobs.ranks[rows] = by.logprobs.ranks.to(out.logprobs.ranks.dtype)


def _spread(found: LogprobsTensors, metadata: SamplingMetadata) -> LogprobsTensors:
    """Spread the rows that asked for log-probabilities over all rows; the others are padding."""
    rows = metadata.logprobs_rows
    assert rows is not None
    if len(rows) == metadata.num_rows:
        return found
    out = LogprobsTensors.padding(metadata.num_rows, found.token_ids.shape[1] - 1, rows.device)
    out.token_ids[rows], out.logprobs[rows], out.ranks[rows] = found.token_ids, found.logprobs, found.ranks
    return out


def _scores(logits: Tensor, rows: RandomRows) -> Tensor:
    return take_rows(logits, rows.rows) / rows.temperature


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's best id int64 [R], the lowest among equals, and its logit [R]; NaN if there is one."""
    if devices.on_cpu(logits):
        return cpu.argmax(logits)
    ids = logits.argmax(-1)
    return ids, logits.gather(1, ids[:, None])[:, 0]
