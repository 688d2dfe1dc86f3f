"""A device whose KV cache holds fingerprints instead of keys and values, and the model of truth that runs on it.

The "key and value" of a position is a fingerprint of every token up to and including it. "Attention" compares what the
block table leads to with what the sequence's own tokens say it must be, so that a block that is shared, copied, evicted
or reused wrongly is seen at the first read. The "sampled" token is a function of the fingerprint and of the sample's
identity: a request's output can be computed alone and compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from core_helpers import EOS

from octavo.core.spec_decode.drafts import ON_DEVICE
from octavo.core.spec_decode.worker_drafts import WorkerDrafts
from octavo.interface.images import key_token_ids
from octavo.interface.messages import EngineCoreRequest, LogprobsLists
from octavo.interface.step import ModelRunnerOutput, NewRequestData, SchedulerOutput

UNREADABLE = -2  # what a drafter in the worker leaves behind a sequence's tokens
POISON = -1  # the "key and value" that a failed step leaves, and the token sampled from it


def root_fingerprint(request: EngineCoreRequest) -> int:
    """An adapter changes keys and values. A salt does not, but here it does, so that sharing across salts shows."""
    origin = f"{request.cache_salt or ''} {request.adapter.key if request.adapter else ''}"
    return zlib.crc32(origin.encode())  # the same in every process, as hash() of text is not


def extend(fingerprint: int, token: int) -> int:
    return hash((fingerprint, token))


def sample(fingerprint: int, seed: int, index: int) -> int:
    value = hash((fingerprint, seed, index, 0xC0FFEE))
    return EOS if value % 11 == 0 else value // 11 % 3


@dataclass
class Truth:
    """What one sample of a request gives when it is computed alone."""

    tokens: list[int]
    finish_reason: str


def compute_truth(core_request: EngineCoreRequest, index: int, max_model_len: int) -> Truth:
    params = core_request.sampling_params
    fingerprint = root_fingerprint(core_request)
    for token in key_token_ids(core_request.prompt_token_ids, core_request.mm_items):
        fingerprint = extend(fingerprint, token)
    if core_request.pooling is not None:
        return Truth([], "stop")
    tokens: list[int] = []
    budget, tag = core_request.thoughts, list[int]()  # the end of what may be a tag
    began = 0 if budget is not None and not budget.begins else None
    while True:
        if budget is not None and began is not None and len(tokens) - began >= budget.num_tokens:
            most = min(params.max_tokens, max_model_len - len(core_request.prompt_token_ids))
            room = most - len(tokens)
            for token in budget.closing[:room]:
                fingerprint = extend(fingerprint, token)
                tokens.append(token)
            if len(budget.closing) >= room:
                return Truth(tokens, "length")
            budget = None
        token = sample(fingerprint, params.seed or 0, index)
        fingerprint = extend(fingerprint, token)
        tokens.append(token)
        if budget is not None:
            tag.append(token)
            wanted = budget.begins if began is None else budget.ends
            if tag[-len(wanted) :] == wanted:
                budget, began, tag = (budget, len(tokens), []) if began is None else (None, None, [])
        stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if stops and len(tokens) >= params.min_tokens:
            return Truth(tokens, "stop")
        if len(tokens) == params.max_tokens or len(core_request.prompt_token_ids) + len(tokens) >= max_model_len:
            return Truth(tokens, "length")


@dataclass
class SimulatedDrafter:
    """``kind``: right, wrong, half (right), or rubbish: too much, no tokens, nothing at all, or an exception."""

    kind: str
    requests: dict[str, EngineCoreRequest]  # by request_id
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    known: set[str] = field(default_factory=set)
    evidence: list[int] = field(default_factory=list)

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        assert req_id not in self.known
        self.known.add(req_id)

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        assert most >= 1 and req_id in self.known
        index, _, request_id = req_id.partition("#")
        request = self.requests[request_id]
        fingerprint = root_fingerprint(request)
        for token in key_token_ids(token_ids, request.mm_items):
            fingerprint = extend(fingerprint, token)
        drafts = []
        for _ in range(most + (self.kind == "rubbish")):
            token = sample(fingerprint, request.sampling_params.seed or 0, int(index))
            fingerprint = extend(fingerprint, token)
            wrong = self.kind == "wrong" or (self.kind != "right" and self.rng.random() < 0.5)
            drafts.append((token + 1) % 3 if wrong else token)
        self.evidence = [self.rng.randrange(1, 5) for _ in drafts]
        if self.kind == "rubbish":
            what = self.rng.randrange(5)
            del self.evidence[self.rng.randrange(len(drafts)) :]
            if what == 0:
                raise RuntimeError("the drafter is broken")
            drafts[self.rng.randrange(len(drafts))] = [-1, 10, "no token", True][what - 1]  # type: ignore[call-overload]
        return drafts

    def guess(self, req_id: str, token_ids: list[int], count: int) -> list[int]:
        """On the device: as many tokens as are asked for, whatever they are worth."""
        known, self.known = self.known, {req_id}
        try:
            drafts = self.propose(req_id, token_ids, count)
        except RuntimeError:
            drafts = [0] * count
        self.known = known
        return [token if type(token) is int and 0 <= token <= EOS else 0 for token in drafts[:count]]

    def forget(self, req_id: str) -> None:
        self.known.remove(req_id)
        if self.kind == "rubbish":
            raise RuntimeError("the drafter is broken")


class SimulatedWorkerDrafts(WorkerDrafts):
    """A drafter in the worker; what it guesses is made where it is asked for."""

    def __init__(self, drafter: SimulatedDrafter) -> None:
        super().__init__()
        self.start, self.propose, self.forget = drafter.start, drafter.propose, drafter.forget  # type: ignore[method-assign]


@dataclass
class Row:
    """What a runner keeps of one sequence."""

    data: NewRequestData
    tokens: list[int]
    block_ids: list[list[int]]  # of each group
    num_computed: int
    fingerprints: list[int]
    poisoned: bool = False
    drafts: list[int] = field(default_factory=list)  # on the device
    num_kept: int = 0  # rows of the last step that its state has not seen
    num_told: int = 0  # tokens that the first stage of a pipeline knows
    state_pages: list[int] = field(default_factory=list)
    num_state_tokens: int = 0


@dataclass
class SimulatedDevice:
    """Executes SchedulerOutputs in order, exactly as a runner must."""

    num_blocks: int  # with the null block
    block_size: int
    max_num_seqs: int
    max_model_len: int
    requests: dict[str, EngineCoreRequest]  # by request_id, for what NewRequestData does not carry
    windows: tuple[int | None, ...] = (None,)  # of the groups: what "attention" of each looks at
    drafter: SimulatedDrafter | None = None  # on the device, which verifies its guesses without a word to the host
    max_surplus: int = 0  # tokens that steps in flight may compute beyond a sequence's end
    is_pipeline: bool = False  # whose first stage knows the tokens alone that it is told
    rows: dict[str, Row] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)  # in slots, by key
    encoder_budget: int = 0  # embeddings of images that are kept at most
    encoded: dict[str, int] = field(default_factory=dict)  # digest -> embeddings
    lost: set[str] = field(default_factory=set)  # images that a step which failed was to encode
    # Of blocks that hold a part of a state: which part, and the fingerprint of the tokens that it has seen
    states: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots: list[int | None] = [None] * (self.num_blocks * self.block_size)

    def execute(self, step: SchedulerOutput, failing: bool = False, nan_rows: Iterable[str] = ()) -> ModelRunnerOutput:
        """``failing``: the step breaks on the way and leaves garbage. ``nan_rows``: these sequences get an error."""
        for req_id in step.finished_req_ids:
            self.rows.pop(req_id, None)
        self.adapters |= {slot: adapter.key for slot, adapter in step.adapters.items()}
        self._encode(step, failing)
        self._copy(step, failing)
        for data in step.scheduled_new_reqs:
            self._add(data)
        failing |= self._lacks_images(step)
        assert len(self.rows) <= self.max_num_seqs, "more rows than max_num_seqs"
        for change in step.scheduled_cached_reqs:
            row = self.rows[change.req_id]
            for group, index, block_id in change.replaced_blocks:
                row.block_ids[group][index] = block_id
            for blocks, new in zip(row.block_ids, change.new_block_ids, strict=bool(change.new_block_ids)):
                blocks += new
        for req_id, (token, position) in step.last_tokens.items():
            row = self.rows[req_id]
            num_drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
            assert position == row.num_computed + step.num_scheduled_tokens[req_id] - num_drafts - 1
            assert row.tokens[position:] == [token], f"{req_id} is told another token than was sampled"
            row.num_told = position + 1
        drafts_of = self._take_drafts(step)
        self._write(step.num_scheduled_tokens, failing)
        self._scan(step, failing)
        output = ModelRunnerOutput()
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            self._attend(req_id, num_tokens)
            self.rows[req_id].drafts = []
            self._finish_row(req_id, num_tokens, drafts_of.get(req_id, []), output)
        for req_id, count in step.num_draft_tokens.items():
            self._read_ahead(req_id, count)
            if self.drafter is not None and count:
                self.rows[req_id].drafts = self.drafter.guess(req_id, self.rows[req_id].tokens, count)
        assert list(output.sampled_token_ids) == step.sampled_req_ids, "the step samples others than it says"
        if failing:
            return ModelRunnerOutput(errors=dict.fromkeys(step.num_scheduled_tokens, "the step failed"))
        for req_id in nan_rows:
            output.errors[req_id] = "NaN"
        return output

    def _encode(self, step: SchedulerOutput, failing: bool) -> None:
        for digest in step.free_encoder_hashes:
            assert digest in self.encoded or digest in self.lost, "freed twice"
            self.encoded.pop(digest, None)
            self.lost.discard(digest)
        for item in step.encoder_inputs:
            assert item.digest not in self.encoded and item.digest not in self.lost, "encoded twice"
            assert item.tensors, "nothing to encode"
            if failing:
                self.lost.add(item.digest)
            else:
                self.encoded[item.digest] = item.num_embeds
        assert sum(self.encoded.values()) <= self.encoder_budget, "more embeddings than there is room for"

    def _lacks_images(self, step: SchedulerOutput) -> bool:
        """Whether images are missing that an earlier step failed to encode. Any others are there."""
        failing = False
        for req_id, count in step.num_scheduled_tokens.items():
            row = self.rows[req_id]
            start, end = row.num_computed, row.num_computed + count
            for item in row.data.mm_items or ():
                assert not item.tensors
                inside = range(max(start, item.offset), min(end, item.end))
                if item.whole and inside:
                    assert inside[-1] == item.end - 1, "an image is cut in two"
                if any(item.is_embed[position - item.offset] for position in inside):
                    failing |= item.digest in self.lost
                    assert item.digest in self.encoded or item.digest in self.lost, f"{req_id} lacks an image"
        return failing

    def _take_drafts(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Each sequence's drafts, appended to its tokens."""
        drafts_of = dict(step.scheduled_spec_decode_tokens)
        for req_id, drafts in drafts_of.items():
            assert drafts and req_id in step.num_scheduled_tokens
            row = self.rows[req_id]
            if self.drafter is not None:
                assert set(drafts) == {ON_DEVICE} and len(drafts) <= len(row.drafts), "drafts that nobody has made"
                drafts = drafts_of[req_id] = row.drafts[: len(drafts)]
            for token in drafts:
                self._append(row, token)
            row.num_told += len(drafts)
        return drafts_of

    def contents(self, block_id: int) -> list[int | None]:
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def _copy(self, step: SchedulerOutput, failing: bool) -> None:
        pairs = step.block_copies
        changed = {block_id for row in step.scheduled_cached_reqs for *_, block_id in row.replaced_blocks}
        changed.update(i for row in step.scheduled_new_reqs for blocks in row.block_ids for i in blocks)
        assert changed >= {target for _, target in pairs}, "a copy that nobody asked for"
        sources, targets = {source for source, _ in pairs}, [target for _, target in pairs]
        assert not sources & set(targets), "a block is source and target of copies in one step"
        assert len(set(targets)) == len(targets), "two copies into one block"
        size = self.block_size
        read = [[POISON] * size if failing else self.contents(source) for source, _ in pairs]
        for target, values in zip(targets, read, strict=True):
            self.slots[target * size : (target + 1) * size] = values

    def _add(self, data: NewRequestData) -> None:
        assert data.req_id not in self.rows, f"{data.req_id} has a row already"
        request = self.requests[data.req_id.partition("#")[2]]
        fingerprint = root_fingerprint(request)
        keys = key_token_ids(data.token_ids, request.mm_items)
        fingerprints = [fingerprint := extend(fingerprint, token) for token in keys]
        row = Row(
            data,
            list(data.token_ids),
            [blocks[:] for blocks in data.block_ids],
            data.num_computed_tokens,
            fingerprints,
            num_told=len(data.token_ids),
            state_pages=data.state_pages or [],
            num_state_tokens=data.num_state_tokens,
        )
        self.rows[data.req_id] = row

    def _write(self, num_scheduled: dict[str, int], failing: bool) -> None:
        written: set[int] = set()
        for req_id, num_tokens in num_scheduled.items():
            row = self.rows[req_id]
            adapter = self.requests[req_id.partition("#")[2]].adapter
            assert (adapter.key if adapter else None) == self.adapters.get(row.data.adapter_slot), "another's adapter"
            end = row.num_computed + num_tokens
            known = row.num_told if self.is_pipeline else len(row.tokens)
            assert num_tokens > 0 and end <= known, f"{req_id} is given tokens that it does not have"
            for group, blocks in enumerate(row.block_ids):
                assert end <= len(blocks) * self.block_size, f"{req_id} writes beyond its block table"
                for position in range(max(row.num_computed, row.data.num_kv_tokens), end):
                    slot = self._slot(row, group, position)
                    assert slot >= self.block_size, f"{req_id} writes to the null block"
                    assert slot not in written, "two sequences write one slot in one step"
                    written.add(slot)
                    value = self.group_value(group, row.fingerprints[position])
                    self.states.pop(slot // self.block_size, None)
                    self.slots[slot] = POISON if failing or row.poisoned else value

    def _scan(self, step: SchedulerOutput, failing: bool) -> None:
        """Go on from the states, and write what is certain: not the row after which a token is sampled."""
        moved = {change.req_id: change.state_pages for change in step.scheduled_cached_reqs if change.state_pages}
        snapshots = {change.req_id: change.snapshot for change in step.scheduled_cached_reqs if change.snapshot}
        read, writes = dict[str, list[int]](), dict[str, tuple[list[int], int]]()
        for req_id, count in step.num_scheduled_tokens.items():
            row = self.rows[req_id]
            if not row.state_pages:
                continue
            if row.num_state_tokens:
                read[req_id] = row.state_pages
                found = [self.states.get(page) for page in row.state_pages]
                row.poisoned |= any(one is not None and one[1] == POISON for one in found)
                seen = row.fingerprints[row.num_state_tokens - 1]
                expected = [(part, seen) for part in range(len(found))]
                assert row.poisoned or found == expected, f"{req_id} goes on from another state"
            assert 0 <= row.num_computed - row.num_state_tokens <= row.num_kept, "rows are pending that were not kept"
            row.num_kept = len(step.scheduled_spec_decode_tokens.get(req_id, ())) + (req_id in step.sampled_req_ids)
            until = row.num_computed + count - row.num_kept
            if until > row.num_state_tokens:
                row.state_pages = moved.pop(req_id, row.state_pages)
                if req_id in snapshots:
                    position, pages = snapshots.pop(req_id)
                    assert row.num_computed < position < until, "a snapshot of what the step does not commit"
                    writes[f"snapshot of {req_id}"] = pages, row.fingerprints[position - 1]
                row.num_state_tokens = until
                writes[req_id] = row.state_pages, row.fingerprints[until - 1]
        assert not moved and not snapshots, "a state goes elsewhere of which nothing is written"
        written = [page for pages, _ in writes.values() for page in pages]
        assert len(set(written)) == len(written), "two sequences write one state"
        for req_id, pages in read.items():
            others = {page for other, (own, _) in writes.items() if other != req_id for page in own}
            assert not others & set(pages), "a state is read and written by two sequences in one step"
        for req_id, (pages, seen) in writes.items():
            poisoned = failing or self.rows[req_id.removeprefix("snapshot of ")].poisoned
            for part, page in enumerate(pages):
                self.states[page] = part, POISON if poisoned else seen
                self.slots[page * self.block_size : (page + 1) * self.block_size] = [UNREADABLE] * self.block_size

    def _read_ahead(self, req_id: str, count: int) -> None:
        """A drafter in the worker leaves what nobody may ever read behind a sequence's computed tokens."""
        row = self.rows[req_id]
        for group, blocks in enumerate(row.block_ids):
            room = len(blocks) * self.block_size
            for position in range(max(row.num_computed, row.data.num_kv_tokens), min(row.num_computed + count, room)):
                slot = self._slot(row, group, position)
                self.states.pop(slot // self.block_size, None)
                self.slots[slot] = UNREADABLE

    def _attend(self, req_id: str, num_tokens: int) -> None:
        """A group sees what the window of the first token computed shows, and all after that."""
        row = self.rows[req_id]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.num_computed - window + 1)
            for position in range(first, row.num_computed + num_tokens):
                value = self.slots[self._slot(row, group, position)]
                row.poisoned |= value == POISON
                assert row.poisoned or value == self.group_value(group, row.fingerprints[position]), (
                    f"{req_id} reads another sequence's KV at position {position}, or another group's"
                )

    @staticmethod
    def group_value(group: int, fingerprint: int) -> int:
        """The "key and value" of a position in one of the groups."""
        return hash((group, fingerprint)) if group else fingerprint

    def _slot(self, row: Row, group: int, position: int) -> int:
        return row.block_ids[group][position // self.block_size] * self.block_size + position % self.block_size

    @staticmethod
    def _append(row: Row, token: int) -> None:
        row.fingerprints.append(extend(row.fingerprints[-1], token))
        row.tokens.append(token)

    def _finish_row(self, req_id: str, num_tokens: int, drafts: list[int], output: ModelRunnerOutput) -> None:
        row, data = self.rows[req_id], self.rows[req_id].data
        start = row.num_computed
        row.num_computed += num_tokens
        if data.sampling_params.prompt_logprobs is not None and data.sample_index == 0:
            until = min(row.num_computed, data.num_prompt_tokens - 1)
            if until > start:
                targets = row.tokens[start + 1 : until + 1]
                output.prompt_logprobs[req_id] = LogprobsLists(
                    [[token] for token in targets],
                    [[-1.0 * p] for p in range(start + 1, until + 1)],
                    [1] * len(targets),
                )
        if row.num_computed < len(row.tokens):
            return
        if data.pooling is not None:
            output.sampled_token_ids[req_id] = []
            output.embeddings[req_id] = [float(row.fingerprints[-1])]
            return
        num_output = len(row.tokens) - data.num_prompt_tokens
        most = (data.sampling_params.max_tokens or 1 << 60) + self.max_surplus
        assert num_output < most, f"{req_id} is sampled beyond max_tokens"
        assert len(row.tokens) < self.max_model_len, f"{req_id} is sampled beyond max_model_len"
        known = len(row.tokens) - len(drafts)
        del row.tokens[known:], row.fingerprints[known:]
        for draft in [*drafts, None]:
            seed = data.sampling_params.seed or 0
            token = POISON if row.poisoned else sample(row.fingerprints[-1], seed, data.sample_index)
            self._append(row, token)
            if token != draft:
                break
        new = row.tokens[known:]
        row.num_computed -= len(drafts) + 1 - len(new)
        output.sampled_token_ids[req_id] = new
