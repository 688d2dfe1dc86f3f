"""The engine core: a scheduler, an executor, and `step` between them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.encoder_cache import EncoderCacheManager
from octavo.core.encoder_scheduler import EncoderScheduler
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_events import KVEventLog
from octavo.core.lora import AdapterSlots
from octavo.core.request import RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_interface import SchedulerInterface
from octavo.core.spec_decode.drafts import Drafter, Drafts
from octavo.core.spec_decode.lengths import DraftLengths
from octavo.core.spec_decode.worker_drafts import WorkerDrafts
from octavo.core.states.manager import StateSettings
from octavo.core.states.points import DEFAULT_INTERVAL
from octavo.engine.spec_decode.predictions import MOST_PREDICTED, obstacle_to_predictions
from octavo.errors import ConfigError, DeviceLostError, OctavoError
from octavo.executor.multiproc import make_executor
from octavo.executor.ranks import Ranks
from octavo.executor.uniproc import Executor, UniProcExecutor
from octavo.interface.engine_config import EngineConfig, KVEventsConfig, SpeculativeConfig
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.memory.advice import out_of_memory
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.predicted import PredictionDrafter
from octavo.spec_decode.suffix import SuffixDrafter
from octavo.system.logging_setup import log_once

if TYPE_CHECKING:
    from octavo.engine.kv_events.publisher import KVEventsPublisher
    from octavo.executor.lock_step import LockStep

logger = logging.getLogger(__name__)


@dataclass
class _Preparing:
    """A request whose grammar is being compiled."""

    request: EngineCoreRequest
    future: Future[None]


class EngineCore:
    """Add requests, call `step` while `has_unfinished_requests`. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        ranks: Ranks | None = None,
        lock_step: LockStep | None = None,
    ) -> None:
        """``ranks``: started already, of an engine of several; ``lock_step``: with engines that have other experts."""
        self._lock_step = lock_step
        if lock_step is not None:
            executor = UniProcExecutor(config, lock_step=lock_step)
        self._kv_events = _make_publisher(config.kv_events)  # before the model is loaded: an endpoint may be taken
        self._kv_event_log: KVEventLog | None = None
        self.executor = executor or make_executor(config, ranks)
        self.config = self.executor.config
        cache = self.config.cache
        layout = self.executor.kv_layout
        self.scheduler: SchedulerInterface
        self._drafts: Drafts | None = None
        self._obstacle_to_predictions = obstacle_to_predictions(self.config, self.executor.max_in_flight > 1)
        self._drafts_of_predictions: Drafts | None = None  # where there are no others
        self._predicted: set[str] = set()  # ids of unfinished requests for which there are such
        if self.config.model.is_encoder:
            self.scheduler = EncoderScheduler(self.config.scheduler)
        else:
            kv = KVCacheManager(
                self.executor.num_blocks,
                cache.block_size,
                cache.enable_prefix_caching,
                self.executor.prefix_cache_blocks,
                [group.window for group in layout.groups],
                layout.step_tokens,
                self._state_settings(),
                cache.prefix_retention_share,
            )
            stages = self.config.parallel.pipeline_parallel_size
            self._drafts = _make_drafts(self.config, self.executor.max_in_flight > 1 and stages == 1)
            if self._obstacle_to_predictions is None and self._drafts is None:
                size = self.config.model.vocab_size
                drafts = Drafts(PredictionDrafter(None), MOST_PREDICTED, size, DraftLengths(), only_predicted=True)
                self._drafts_of_predictions = drafts
            slots = AdapterSlots(self.config.lora.max_loras) if self.config.lora is not None else None
            images, kept = None, self.config.scheduler.mm_encoder_cache_tokens
            if kept and self.config.model.reads_images:
                # On a CPU an image takes as long as many tokens: streams beside it wait for one, not for several.
                images = EncoderCacheManager(kept, 1 if self.config.device == "cpu" else None)
            self.scheduler = Scheduler(self.config.scheduler, kv, self._drafts, stages, slots, images)
            if self._kv_events is not None and cache.enable_prefix_caching:
                self._kv_events.start([group.window for group in layout.groups])
                self._kv_event_log = kv.log_events()
        if self._kv_events is not None and self._kv_event_log is None:
            logger.warning("there is no prefix cache, so kv_events_config publishes nothing")
        self.num_steps = 0
        self._preparing: dict[str, _Preparing] = {}  # requests whose grammar is being compiled
        self._grammars: dict[str, Future[None]] = {}  # of unfinished requests
        self._loading: dict[Adapter, Future[Adapter]] = {}  # adapters that have a slot and are not in memory yet
        self._pending: list[EngineCoreOutput] = []  # of requests that ended outside of steps, for the next step
        self._in_flight: deque[tuple[SchedulerOutput, PendingOutput]] = deque()

    def _state_settings(self) -> StateSettings | None:
        layout, scheduler = self.executor.kv_layout, self.config.scheduler
        if layout.state is None:
            return None
        blocks = -(-scheduler.max_num_batched_tokens // layout.block_size) + scheduler.max_num_seqs
        return StateSettings(layout.state_blocks, blocks * len(layout.groups), DEFAULT_INTERVAL)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when it can never run or its id is in use."""
        if request.adapter is not None and self.config.lora is None:
            raise ValueError(f"model {request.adapter.name!r}: the engine runs without LoRA adapters (enable_lora)")
        if request.request_id in self._preparing:
            raise ValueError(f"request_id {request.request_id!r} is already in use by an unfinished request")
        if request.prediction is not None:
            self._expect(request)
        if request.grammar is not None:
            self._release_grammars()  # of a request with the same id that has just ended
            if request.request_id in self._grammars:
                raise ValueError(f"request_id {request.request_id!r} is already in use by an unfinished request")
            future = self.executor.prepare_grammar(request.grammar)
            self._grammars[request.request_id] = future
            self._preparing[request.request_id] = _Preparing(request, future)
        else:
            self.scheduler.add_request(request)

    def _expect(self, request: EngineCoreRequest) -> None:
        if (obstacle := self._obstacle_to_predictions) is not None:
            log_once(logger, logging.WARNING, "prediction: %s; answers come as without one", obstacle)
        elif self._drafts_of_predictions is not None:
            self._predicted.add(request.request_id)

    def _follow_predictions(self) -> None:
        """Speculate for as long as a request has a prediction. There is no step in flight."""
        self._predicted = {i for i in self._predicted if i in self._preparing or self.scheduler.has_request(i)}
        drafts = self._drafts_of_predictions if self._predicted else None
        if drafts is not self._drafts and isinstance(self.scheduler, Scheduler):
            self._drafts = drafts
            self.scheduler.use_drafts(drafts)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free what they hold; unknown ids are ignored. Their outputs have finish_reason "abort"."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            waiting = self._preparing.pop(request_id, None)
            if waiting is not None:
                self._end_waiting(waiting.request, "abort")
        self._pending += self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._release_grammars()
        self._publish_kv_events()

    def finish_sample(self, request_id: str, index: int) -> None:
        """End one sequence whose text has matched a stop string. Gives no output: the front end reports the end."""
        self.scheduler.finish_sample(request_id, index, RequestStatus.FINISHED_STOPPED)
        self._release_grammars()
        self._publish_kv_events()

    def load_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """Read an adapter in the background, and check it; see `Executor.load_adapter`."""
        if self.config.lora is None:
            raise ValueError("the engine runs without LoRA adapters (enable_lora)")
        return self.executor.load_adapter(adapter)

    def check_grammar(self, grammar: str) -> None:
        """Wait until a grammar is compiled; it stays cached for a while. Raises ValueError when it cannot be used."""
        future = self.executor.prepare_grammar(grammar)
        try:
            while not future.done():
                self.executor.poll_grammars(0.1)
            future.result()
        finally:
            self.executor.release_grammar(future)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while sequences hold blocks."""
        done = self.scheduler.kv.reset_prefix_cache()
        self._publish_kv_events()
        return done

    def _publish_kv_events(self) -> None:
        """Publish what the prefix cache has gained and lost."""
        if self._kv_event_log is not None and self._kv_events is not None:
            entries = self._kv_event_log.take()
            if entries:
                self._kv_events.publish(entries)

    def share_block_map(self, cells: memoryview) -> None:
        """Keep a byte for each block in ``cells``, as `octavo.interface.block_map` says, from now on."""
        self.scheduler.kv.share_block_map(cells)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The ids of the blocks that each sample of a request holds, in order; nothing for an unknown id."""
        return self.scheduler.block_ids(request_id)

    def has_unfinished_requests(self) -> bool:
        """True if `step` is to be called. Also while a step is in flight whose sequences have all ended."""
        return (
            self.scheduler.has_unfinished_requests()
            or bool(self._pending)
            or bool(self._preparing)
            or bool(self._in_flight)
        )

    def step(self) -> EngineCoreOutputs:
        """Start a step and take the results of the oldest one in flight: the same one unless steps overlap.

        When the model itself fails, every sequence of the step ends with an error. Raises DeviceLostError when every
        later step would fail too.
        """
        started = time.perf_counter()
        if self._predicted:
            self._follow_predictions()
        if self._grammars:
            self._poll_grammars()
        if self.config.lora is not None:
            self._poll_adapters()
        outputs, self._pending = self._pending, []
        taken: SchedulerOutput | None = None
        while taken is None:
            step = self.scheduler.schedule(now=time.time())
            if step.num_scheduled_tokens:
                self._in_flight.append((step, self._execute(step)))
                if len(self._in_flight) < self.executor.max_in_flight:
                    continue
            elif not self._in_flight:
                self.keep_pace()
                break
            taken, output = self._take_results()
            outputs += self.scheduler.update_from_output(output)
            self.num_steps += 1
        self._release_grammars()
        self._publish_kv_events()
        if taken is None and not outputs and self._grammars:
            self.executor.poll_grammars(0.01)  # idle until a grammar is compiled
        if taken is None and not outputs and self._loading:
            wait(self._loading.values(), 0.01, FIRST_COMPLETED)
        stats = self.scheduler.make_stats()
        stats.num_prompt_tokens = taken.num_prompt_tokens if taken else 0
        stats.num_generation_tokens = sum(len(output.new_token_ids) for output in outputs)
        stats.step_time = time.perf_counter() - started
        if self._drafts is not None and taken is not None and not taken.num_prompt_tokens:
            seconds, alone = stats.step_time - output.draft_seconds, not self._in_flight
            self._drafts.observe_step(taken.total_num_scheduled_tokens, seconds, alone, output.draft_seconds)
            self._drafts.observe_drafting(sum(map(len, output.draft_token_ids.values())), output.draft_seconds)
        stats.recording_obstacle = self.executor.recording_obstacle
        return EngineCoreOutputs(outputs, stats, time.time())

    @property
    def is_called(self) -> bool:
        """True if `keep_pace` has something to do, whether or not there are requests here."""
        return self._lock_step is not None and self._lock_step.is_called()

    def keep_pace(self) -> None:
        """Take part in a step of engines that need this one's experts. Raises DeviceLostError when one is lost."""
        if self.is_called:
            self._execute(SchedulerOutput(-1))()
            self.num_steps += 1

    def _poll_adapters(self) -> None:
        """Have adapters loaded that have got a slot; end the requests of one that cannot be."""
        slots = self.scheduler.adapters
        for adapter in slots.take_wanted():
            self._loading[adapter] = self.load_adapter(adapter)
        for adapter, future in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[adapter]
            try:
                future.result()
            except Exception as error:
                if not isinstance(error, OctavoError):
                    logger.exception("adapter %r could not be loaded", adapter.name)
                slots.failed(adapter)
                self._pending += self.scheduler.finish_adapter(adapter, str(error))
            else:
                slots.loaded(adapter)

    def _poll_grammars(self) -> None:
        """Queue requests whose grammar is compiled, end those whose grammar cannot be used."""
        self.scheduler.held = self.executor.poll_grammars(0.0)
        for request_id, waiting in list(self._preparing.items()):
            if not waiting.future.done():
                continue
            del self._preparing[request_id]
            try:
                waiting.future.result()
            except ValueError as error:
                self._end_waiting(waiting.request, "error", str(error))
                continue
            try:
                self.scheduler.add_request(waiting.request)
            except ValueError as error:
                self._pending.append(EngineCoreOutput(request_id, -1, [], finish_reason="error", error=str(error)))

    def _release_grammars(self) -> None:
        """Release the grammars of requests that have ended."""
        for request_id in [i for i in self._grammars if i not in self._preparing and not self.scheduler.has_request(i)]:
            self.executor.release_grammar(self._grammars.pop(request_id))

    def _end_waiting(self, request: EngineCoreRequest, reason: str, error: str | None = None) -> None:
        for index in range(request.sampling_params.n):
            output = EngineCoreOutput(request.request_id, index, [], finish_reason=reason)
            if error is not None:
                output.error, output.error_param = f"{request.grammar_field} {error}", request.grammar_field
            self._pending.append(output)

    def _execute(self, step: SchedulerOutput) -> PendingOutput:
        try:
            return self.executor.execute_model(step)
        except BaseException as error:
            failed = self._fail(step, error)
            if not isinstance(error, Exception):
                self._in_flight.append((step, lambda: failed))  # the scheduler counts on its results
                raise
            return lambda: failed

    def _take_results(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The oldest step in flight and its results; waits for them."""
        step, pending = self._in_flight.popleft()
        try:
            return step, pending()
        except BaseException as error:
            failed = self._fail(step, error)
            if not isinstance(error, Exception):
                self._in_flight.appendleft((step, lambda: failed))
                raise
            return step, failed

    def _fail(self, step: SchedulerOutput, error: BaseException) -> ModelRunnerOutput:
        """Results that end every sequence of the step with an error. Raises DeviceLostError when no later step can
        succeed: the process must end then, because an engine whose every request fails looks healthy."""
        req_ids = list(step.num_scheduled_tokens)
        logger.error(
            "step %d failed, ending its %d sequences with an error", step.step_id, len(req_ids), exc_info=error
        )
        if isinstance(error, Exception) and self.executor.is_lost():
            raise DeviceLostError(f"the device cannot be used any more: {error}") from error
        reason = f"the step failed: {out_of_memory(error, self.config, self.config.device) or error}"
        return ModelRunnerOutput(errors=dict.fromkeys(req_ids, reason))

    def check_integrity(self) -> None:
        """Raise AssertionError when the engine's bookkeeping contradicts itself."""
        self.scheduler.check_integrity()


def _make_drafts(config: EngineConfig, overlap: bool) -> Drafts | None:
    speculative = config.speculative
    if not speculative.is_on:
        return None
    return Drafts(
        _make_drafter(speculative), speculative.num_speculative_tokens, config.model.vocab_size, DraftLengths(), overlap
    )


def _make_drafter(config: SpeculativeConfig) -> Drafter:
    if config.in_worker:
        return WorkerDrafts()
    if config.method == "suffix":
        suffixes = SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        return PredictionDrafter(suffixes)
    return PredictionDrafter(NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max))


def _make_publisher(config: KVEventsConfig) -> KVEventsPublisher | None:
    if not config.is_on:
        return None
    try:
        from octavo.engine.kv_events.publisher import KVEventsPublisher
    except ImportError as error:
        raise ConfigError(f"kv_events_config needs {error.name}: pip install 'octavo[server]'") from None
    return KVEventsPublisher(config)
