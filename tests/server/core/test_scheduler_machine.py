"""Whatever is added, batched, chunked, shared, preempted, aborted or broken, every request gets what it gets alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core_helpers import EOS, core_request, examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machine_configs import configs, hybrid_changes, tight_configs
from recount import recount
from simulated_device import (
    POISON,
    SimulatedDevice,
    SimulatedDrafter,
    SimulatedWorkerDrafts,
    Truth,
    compute_truth,
    extend,
    root_fingerprint,
)
from support.kv_events import CacheMirror

from octavo.core.encoder_cache import EncoderCacheManager
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.lora import AdapterSlots
from octavo.core.prefix_hash import root_of
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.core.spec_decode.drafts import Drafts
from octavo.core.spec_decode.lengths import DraftLengths
from octavo.core.states.manager import StateSettings
from octavo.interface.block_map import count_blocks
from octavo.interface.engine_config import SchedulerConfig, num_sampled_rows
from octavo.interface.images import HostTensor, ImageItem
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, Retain
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput
from octavo.interface.thoughts import ThoughtBudget

# Long enough a base that prompts share their beginnings, and few enough tokens that they agree by chance as well.
BASE = [0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 2, 1, 0, 1, 0, 2] * 3

# None three times: most requests have none. Two of a name: other weights.
ADAPTERS = [
    None,
    None,
    None,
    Adapter("a", "", "1"),
    Adapter("b", "", "1"),
    Adapter("b", "", "2"),
    Adapter("c", "", "1"),
]


# Of text before it, tokens, which one, whether its tokens are computed in one step. Mostly none.
IMAGES = st.one_of(
    st.just([]),
    st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 3, 9]), st.integers(1, 5), st.integers(0, 2), st.booleans()), max_size=3
    ),
)


WISHES = st.lists(st.tuples(st.integers(1, 60), st.sampled_from([60, 300])), max_size=3).map(
    lambda wishes: [
        Retain(num_tokens, max(seconds for end, seconds in wishes if end >= num_tokens))
        for num_tokens, _ in sorted(wishes)
    ]
)
# Of thoughts, mostly none. Tags are short, so that they are found by chance.
BUDGETS = st.one_of(
    st.none(),
    st.none(),
    st.builds(
        ThoughtBudget,
        num_tokens=st.sampled_from([0, 1, 2, 5, 9]),
        closing=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        ends=st.sampled_from([[2], [1, 2], [9]]),
        begins=st.sampled_from([[], [], [1], [0, 1]]),
    ),
)


@dataclass
class SampleLog:
    """What has come back of one sample, beside what must."""

    request: EngineCoreRequest
    truth: Truth
    tokens: list[int] = field(default_factory=list)
    prompt_logprob_tokens: list[int] = field(default_factory=list)
    ended: str | None = None


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: dict) -> None:
        if config["num_stages"] > 1:  # where the host's drafters alone guess, and steps have other sequences
            config = config | {"in_worker": False, "overlap": False}
        if blocks_of_state := config["state_blocks"]:  # no drafts beside a step in flight, no pipeline
            config = config | {"overlap": config["overlap"] and not config["in_worker"], "num_stages": 1}
            config["max_in_flight"] = 1 if config["num_speculative_tokens"] else config["max_in_flight"]
        size, max_model_len = config["block_size"], config["max_model_len"]
        self.num_stages, windows = config["num_stages"], config["windows"]
        self.max_in_flight = config["max_in_flight"] if self.num_stages == 1 else self.num_stages
        step_tokens = self.max_in_flight * config["max_num_batched_tokens"]
        step_tokens += config["num_speculative_tokens"] * config["in_worker"]
        caching = config["prefix_caching"]
        states = None
        if blocks_of_state:
            states = StateSettings(blocks_of_state, config["headroom"], config["interval"], config["gap"])
        shape = {"windows": windows, "step_tokens": step_tokens, "states": states}
        shape["retention_share"], self.now = config["retention_share"], 1.0
        most = KVCacheManager(1, size, caching, **shape).most_blocks(max_model_len)
        num_blocks = int(most * config["pool"]) + 1
        names = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "policy", "max_model_len")
        self.config = SchedulerConfig(**{name: config[name] for name in names})
        self.kv = KVCacheManager(num_blocks, size, caching, config["prefix_cache_blocks"], **shape)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.drafter = SimulatedDrafter(config["drafter"], self.requests)
        num_drafts = config["num_speculative_tokens"]
        lengths = DraftLengths() if config["adaptive"] else None
        drafter = SimulatedWorkerDrafts(self.drafter) if config["in_worker"] else self.drafter
        self.waits = config["overlap"] and not config["in_worker"]  # for tokens in flight, to guess what follows them
        overlap = config["overlap"]
        self.drafts = Drafts(drafter, num_drafts, EOS + 1, lengths, overlap) if num_drafts else None
        self.adapters, self.loading = AdapterSlots(config["max_loras"]), list[Adapter]()
        self.images_beside_decodes = config["images_beside_decodes"]
        images = EncoderCacheManager(config["encoder_budget"], self.images_beside_decodes)
        self.scheduler = Scheduler(self.config, self.kv, self.drafts, self.num_stages, self.adapters, images)
        self.most_whole = self.config.max_num_batched_tokens - num_sampled_rows(self.config.max_num_seqs, num_drafts)
        if self.config.long_prefill_token_threshold:
            self.most_whole = min(self.most_whole, self.config.long_prefill_token_threshold)
        self.cells = memoryview(bytearray(num_blocks - 1))  # the block map, which others read at any time
        self.kv.share_block_map(self.cells)
        self.events, self.mirror = self.kv.log_events(), CacheMirror(size)
        on_device = self.drafts is not None and self.drafts.on_device
        self.device = SimulatedDevice(
            num_blocks,
            size,
            self.config.max_num_seqs,
            max_model_len,
            self.requests,
            windows,
            self.drafter if on_device else None,
            self.max_in_flight * (num_drafts + 1) * on_device,
            self.num_stages > 1,
            encoder_budget=config["encoder_budget"],
        )
        self.results: deque[ModelRunnerOutput] = deque()
        self.samples: dict[tuple[str, int], SampleLog] = {}
        self.histories: list[list[int]] = [BASE]
        self.fingerprint_after: dict[bytes, int] = {}  # block hash -> fingerprint of its last token
        self.ever_added: list[Request] = []
        self.num_added = 0

    # -- what users do -----------------------------------------------------------------------------------------------

    @rule(
        history=st.integers(0, 1000),
        cut=st.integers(0, 60),
        tail=st.lists(st.integers(0, 2), max_size=4),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop=st.sampled_from([[], [], [], [2]]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from([None, None, None, "salt"]),
        adapter=st.sampled_from(ADAPTERS),
        want=st.sampled_from(["tokens"] * 6 + ["prompt_logprobs", "embedding"]),
        reuse_id=st.booleans(),
        images=IMAGES,
        boundaries=st.lists(st.integers(1, 60), max_size=3).map(sorted),
        retain=WISHES,
        owner=st.sampled_from(["", "", "a", "b"]),
        thoughts=BUDGETS,
    )
    def add(
        self,
        history,
        cut,
        tail,
        n,
        max_tokens,
        min_tokens,
        stop,
        ignore_eos,
        want,
        reuse_id,
        images,
        **fields,
    ) -> None:
        prompt = (self.histories[history % len(self.histories)][:cut] + tail)[: self.config.max_model_len - 1] or [1]
        mm_items = self._put_images(prompt, images)
        free_ids = [i for i in self.requests if i not in {key[0] for key, log in self.samples.items() if not log.ended}]
        request_id = free_ids[-1] if reuse_id and free_ids else f"r{self.num_added}"
        self.num_added += 1
        request = core_request(
            request_id,
            prompt,
            n=1 if want == "embedding" else n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            prompt_logprobs=1 if want == "prompt_logprobs" else None,
            pooling="last" if want == "embedding" else None,
            seed=self.num_added % 3,
            arrival_time=float(self.num_added),
            **fields,
        )
        request.mm_items = mm_items
        request.thoughts = None if want == "embedding" else request.thoughts
        self.scheduler.add_request(request)
        self.ever_added += [r for r in self._requests() if r.request_id == request_id]
        self.requests[request_id] = request
        for index in range(request.sampling_params.n):
            truth = compute_truth(request, index, self.config.max_model_len)
            self.samples[request_id, index] = SampleLog(request, truth)
            if index == 0:
                self.histories.append(prompt + truth.tokens)

    def _put_images(self, prompt: list[int], images: list[tuple[int, int, int, bool]]) -> list[ImageItem] | None:
        """Have images take some of the tokens, which stay what they are: the text may be another request's."""
        items, end = list[ImageItem](), 0
        for gap, length, which, whole in images:
            is_embed = [False, *[True] * (length - 1)] if length > 2 else [True] * length
            offset = end + gap
            end = offset + length
            if end > len(prompt):
                break
            tensor = HostTensor("uint8", (1,), bytes([which]))
            whole &= length <= self.most_whole
            items.append(ImageItem(f"image {which} {is_embed}", offset, is_embed, {"pixels": tensor}, whole=whole))
        return items or None

    def _live(self) -> list[tuple[str, int]]:
        return [key for key, log in self.samples.items() if not log.ended]

    @precondition(lambda self: self._live())
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        live = self._live()
        request_id = live[which % len(live)][0]
        outputs = self.scheduler.finish_requests([request_id, "unknown"], RequestStatus.FINISHED_ABORTED)
        assert {(o.request_id, o.index) for o in outputs} == {key for key in live if key[0] == request_id}
        assert {o.finish_reason for o in outputs} == {"abort"}
        self._deliver(outputs)

    @precondition(lambda self: self._live())
    @rule(which=st.integers(0, 1000))
    def finish_sample(self, which: int) -> None:
        live = self._live()
        request_id, index = live[which % len(live)]
        self.scheduler.finish_sample(request_id, index, RequestStatus.FINISHED_STOPPED)
        self.scheduler.finish_sample(request_id, index, RequestStatus.FINISHED_STOPPED)  # late news: ignored
        self._end(self.samples[request_id, index], "finished from outside")

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.pool.reset_prefix_cache()

    # -- what the engine does ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.results) < self.max_in_flight)
    @rule(mishap=st.sampled_from([None] * 10 + ["step fails", "NaN"]), which=st.integers(0, 1000))
    def schedule(self, mishap: str | None, which: int) -> None:
        self._schedule(failing=mishap == "step fails", nan_row=which if mishap == "NaN" else None, which=which)

    @precondition(lambda self: self.results)
    @rule()
    def update(self) -> None:
        self._deliver(self.scheduler.update_from_output(self.results.popleft()))

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 1000), fails=st.sampled_from([False, False, True]))
    def load(self, which: int, fails: bool) -> None:
        adapter = self.loading.pop(which % len(self.loading))
        if not fails:
            self.adapters.loaded(adapter)
            return
        self.adapters.failed(adapter)
        live = {key for key in self._live() if self.samples[key].request.adapter == adapter}
        outputs = self.scheduler.finish_adapter(adapter, "damaged")
        assert {(o.request_id, o.index) for o in outputs} == live
        self._deliver(outputs)

    @rule(rounds=st.integers(1, 8))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()

    def _round(self) -> None:
        """The overlapped loop: keep the device fed, then take the oldest result."""
        for adapter in self.loading:
            self.adapters.loaded(adapter)
        self.loading.clear()
        while len(self.results) < self.max_in_flight and self._schedule():
            pass
        if self.results:
            self._deliver(self.scheduler.update_from_output(self.results.popleft()))
        self.scheduler.check_integrity()

    def _schedule(self, failing: bool = False, nan_row: int | None = None, which: int = 1) -> bool:
        decoding = [r for r in self.scheduler.running.values() if self._wants_to_decode(r)]
        prompt_tokens_left = {r.req_id: r.num_prompt_tokens - r.num_computed_tokens for r in self._requests()}
        past_prompts = [r for i, r in self.scheduler.running.items() if i not in self.scheduler._prefilling]
        waiting = self.waits and any(r.num_output_placeholders for r in past_prompts)
        most_decoding = -(-len(past_prompts) // self.num_stages)
        waiting |= len(decoding) > most_decoding
        self.now += which % 4 * 20  # seconds, of which clients want prefixes kept for some
        step = self.scheduler.schedule(now=self.now)
        self.loading += self.adapters.take_wanted()
        assert self.scheduler.num_in_flight == len(self.results) + bool(step.num_scheduled_tokens)
        if not step.num_scheduled_tokens:
            return False
        self._check_step(step, decoding, prompt_tokens_left, waiting)
        if past_prompts and self.images_beside_decodes is not None:
            assert len(step.encoder_inputs) <= self.images_beside_decodes, "streams wait for more images than they may"
        if self.num_stages > 1:
            assert len({r.req_id for r in past_prompts} & step.num_scheduled_tokens.keys()) <= most_decoding
            *earlier, this = [{id(s.request): s.sampled for s in one} for one in self.scheduler._in_flight]
            assert not any(one.get(i) for one in earlier for i in this), "a sequence whose token is in flight"
        if self.drafts is not None:
            total = step.total_num_scheduled_tokens
            self.drafts.observe_step(total, 1.0 + which % 7 * total, alone=which % 2 == 0)
        req_ids = list(step.num_scheduled_tokens)
        nan_rows = [] if nan_row is None else [req_ids[nan_row % len(req_ids)]]
        self.results.append(self.device.execute(step, failing, nan_rows))
        for request in self.scheduler.running.values():
            for ours, theirs in zip(
                self.kv.block_ids(request), self.device.rows[request.req_id].block_ids, strict=True
            ):
                passed = ours.count(0)  # the device is not told of what a window has passed
                assert ours[passed:] == theirs[passed:] and not any(ours[:passed]), "block tables differ"
            assert self.kv.state_pages(request) == self.device.rows[request.req_id].state_pages, "states differ"
        self._check_index()
        return True

    def _requests(self) -> list[Request]:
        return list(self.scheduler.requests.values())

    def _wants_to_decode(self, request: Request) -> bool:
        num_output = request.num_output_tokens + request.num_output_placeholders
        hoped = request.num_prompt_tokens + num_output + request.num_drafts * (self.device.drafter is not None)
        ends = num_output >= request.max_tokens or hoped >= self.config.max_model_len
        ends |= self.num_stages > 1
        return (
            request.num_computed_tokens == hoped - 1
            and num_output > 0
            and not (ends and request.num_output_placeholders)
            and request.pooling is None
        )

    def _check_step(
        self, step: SchedulerOutput, decoding: list[Request], prompt_tokens_left: dict[str, int], waiting: bool
    ) -> None:
        given = step.num_scheduled_tokens
        total = sum(given.values())
        assert total == step.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        threshold = self.config.long_prefill_token_threshold
        assert not threshold or max(given.values()) <= threshold
        hits = {data.req_id: data.num_computed_tokens for data in step.scheduled_new_reqs}
        num_prompt = 0
        for req_id, num_tokens in given.items():
            left = prompt_tokens_left[req_id]
            if req_id in hits:
                left = self.scheduler.requests[req_id].num_prompt_tokens - hits[req_id]
            num_prompt += max(0, min(left, num_tokens))
        assert step.num_prompt_tokens == num_prompt
        left_out = [r for r in decoding if r.status is RequestStatus.RUNNING and r.req_id not in given]
        if left_out and not waiting:
            assert total == self.config.max_num_batched_tokens, f"{left_out} wait although there is budget"
            assert given.keys() <= {r.req_id for r in decoding}, f"{left_out} wait behind a prompt"
            assert not step.scheduled_spec_decode_tokens, f"{left_out} wait behind others' drafts"

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            log = self.samples[output.request_id, output.index]
            assert log.ended is None, "an output after the end"
            assert POISON not in output.new_token_ids, "a token computed from a failed step's leftovers"
            assert 0 <= output.num_cached_tokens < len(log.request.prompt_token_ids) + len(log.tokens) + 1
            log.tokens += output.new_token_ids
            if output.prompt_logprobs is not None:
                assert output.index == 0
                log.prompt_logprob_tokens += [ids[0] for ids in output.prompt_logprobs.token_ids]
            if output.finish_reason is not None:
                assert (output.finish_reason == "error") == (output.error is not None)
                self._end(log, output.finish_reason)

    def _end(self, log: SampleLog, how: str) -> None:
        log.ended = how
        if how in ("stop", "length"):
            assert (log.tokens, how) == (log.truth.tokens, log.truth.finish_reason)
            if (
                log.request.sampling_params.prompt_logprobs is not None
                and log is self.samples[log.request.request_id, 0]
            ):
                assert log.prompt_logprob_tokens == log.request.prompt_token_ids[1:]
        else:
            assert log.tokens == log.truth.tokens[: len(log.tokens)]

    @invariant()
    def managers_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert count_blocks(bytes(self.cells)) == recount(self.kv.pool)
            self.mirror.apply(self.events.take())
            assert self.mirror.keys == self.kv.pool.cached_blocks.keys(), "others are told something else"
            assert set(self._live()) == {(r.request_id, r.index) for r in self._requests()}

    def _check_index(self) -> None:
        """Every block that the prefix cache offers holds what it promises."""
        after, size = self.fingerprint_after, self.kv.block_size
        for request in self.ever_added:
            asked = request.core_request
            fingerprint = after.setdefault(root_of(asked), root_fingerprint(asked))
            for i, block_hash in enumerate(request.block_hashes):
                if block_hash not in after:
                    for token in request.key_token_ids[i * size : (i + 1) * size]:
                        fingerprint = extend(fingerprint, token)
                    after[block_hash] = fingerprint
                fingerprint = after[block_hash]
        for block in self.kv.pool.blocks:
            if block.parent_hash is not None:
                fingerprint, group = after[block.parent_hash[:32]], (block.parent_hash[32:] or b"\0")[0]
                expected = [
                    self.device.group_value(group, fingerprint := extend(fingerprint, token)) for token in block.tokens
                ]
                assert self.device.contents(block.block_id)[: len(expected)] == expected, f"{block} does not hold that"
                assert (block.block_hash is not None) == (len(block.tokens) == size)
        for snapshot in self.kv.states.pool.snapshots if self.kv.states is not None else ():
            fingerprint = after[snapshot.parent_hash]
            for token in snapshot.tokens:
                fingerprint = extend(fingerprint, token)
            held = [self.device.states.get(page) for page in snapshot.slot.pages]
            assert held == [(part, fingerprint) for part in range(len(held))], f"{snapshot.position} is another state"

    def teardown(self) -> None:
        """Everything that was not ended from outside finishes, with the right tokens, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        tokens = sum(len(r.prompt_token_ids) + 24 for r in (log.request for log in self.samples.values()))
        bound = 20 * tokens + 100
        while self.scheduler.has_unfinished_requests():
            self._round()
            bound -= 1
            assert bound, f"no end in sight: {self._requests()}"
        while self.results:
            assert not self.scheduler.update_from_output(self.results.popleft()), "an output after the end"
        assert not self._live()
        self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert self.kv.pool.num_free_blocks == self.kv.pool.num_usable_blocks
        assert self.kv.usage == 0.0
        assert not self.drafter.known, "the drafter keeps sequences that have ended"


class TightSchedulerMachine(SchedulerMachine):
    @initialize(config=tight_configs)
    def start(self, config: dict) -> None:
        super().start(config)


class HybridSchedulerMachine(SchedulerMachine):
    """Of models with recurrent layers, where requests begin with snapshots."""

    @initialize(config=configs, changes=hybrid_changes)
    def start(self, config: dict, changes: dict) -> None:
        super().start(config | changes)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = examples(150, stateful_step_count=50)
TestTightSchedulerMachine = TightSchedulerMachine.TestCase
TestTightSchedulerMachine.settings = examples(60, stateful_step_count=30)
TestHybridSchedulerMachine = HybridSchedulerMachine.TestCase
TestHybridSchedulerMachine.settings = examples(80, stateful_step_count=60)
