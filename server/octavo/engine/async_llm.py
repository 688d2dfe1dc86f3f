"""The engine as an asyncio program sees it: requests in, one stream of outputs a request out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.engine.core_client import CoreClient, CoreReady
from octavo.engine.core_launcher import CoreProcess, CoreProcesses
from octavo.engine.data_parallel import CoreClients
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.errors import EngineDeadError, ModelError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from octavo.interface.outputs import RequestOutput
from octavo.interface.sampling_params import SamplingParams
from octavo.metrics.stats import IterationStats, Tenant
from octavo.system.parent import describe_exit

if TYPE_CHECKING:
    from octavo.metrics.log_line import LoadLog
    from octavo.metrics.prometheus import EngineMetrics
    from octavo.metrics.tracing import Tracer
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONG_PROMPT = 4_000  # characters or ids from which a prompt is prepared in a thread


class OutputStream:
    """The outputs of one or several requests, for one reader. A slow reader gets everything since its last output in
    one piece, so nothing piles up.

    The reader awaits `get`, or sets ``on_output``, a callback after which it calls `take`: no task wakes per token.
    """

    def __init__(self) -> None:
        self.on_output: Callable[[], None] | None = None
        self.changed: dict[str, RequestState] = {}  # by request id
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, state: RequestState) -> None:
        """Note that a request has new output."""
        self.changed[state.request.request_id] = state
        self._wake()

    def put_error(self, error: Exception) -> None:
        """Note that the engine has ended: `take` raises ``error`` once everything is taken."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self.on_output is not None:
            self.on_output()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> RequestOutput | None:
        """The next output if there is one. Raises EngineDeadError when the engine has ended and nothing is left."""
        if self.changed:
            return self.changed.popitem()[1].take()
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> RequestOutput:
        """The next output. Raises as `take` does."""
        while (output := self.take()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output


class AsyncLLM:
    """An engine core in its own process, with input and output processing on this side.

    Belongs to one event loop. No method blocks it.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        process: CoreProcess | CoreProcesses,
        metrics: EngineMetrics | None = None,
        load_log: LoadLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.load_log = load_log
        self.tracer = tracer
        self.input_processor = InputProcessor(config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer)
        self.client: CoreClient | CoreClients
        if isinstance(process, CoreProcesses):
            self.client = CoreClients(process, self._take_outputs, self._core_exited)
        else:
            self.client = CoreClient(process, self._take_outputs, self._core_exited)
        self.ready: CoreReady | None = None
        self.dead: EngineDeadError | None = None
        self.core_exited = asyncio.Event()
        self._closing = False
        self.last_stats: SchedulerStats | None = None  # of the newest step
        self._finish_times: deque[float] = deque(maxlen=64)  # monotonic, of the last finished sequences
        self._work_since = float("inf")  # monotonic time since which there has been work
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")

    async def wait_ready(self) -> CoreReady:
        """Wait until the model is loaded. Raises OctavoError when that fails."""
        self.ready = await self.client.wait_ready()
        self.config = self.ready.engine_config
        self.input_processor.follow(self.config)
        return self.ready

    @property
    def num_sequences(self) -> int:
        """Sequences in flight, running or waiting; the ``n`` samples of a request count each."""
        return self.output_processor.num_unfinished_samples

    def num_tokens(self) -> dict[str, list[int]]:
        """Tokens, prompt included, of each unfinished request by id: one number for each sample that has begun to
        answer and is not finished."""
        return {
            request_id: [
                len(state.request.prompt_token_ids) + sample.num_tokens
                for sample in state.samples
                if sample.num_tokens and sample.finish_reason is None
            ]
            for request_id, state in self.output_processor.requests.items()
        }

    # -- requests ----------------------------------------------------------------------------------------------------

    async def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> EngineCoreRequest:
        """`InputProcessor.process`, in a thread when it may take long."""
        process = self.input_processor.process
        # The first request with DRY reads the whole vocabulary, for its breakers.
        if not (isinstance(prompt, dict) or params.dry_multiplier) and self._is_short(prompt, options):
            return process(request_id, prompt, params, **options)
        return await self.run_in_thread(process, request_id, prompt, params, **options)

    def _is_short(self, prompt: str | Sequence[int], options: dict[str, Any]) -> bool:
        return self._work(prompt, options.get("cache_salt")) < _LONG_PROMPT

    def _work(self, prompt: str | Sequence[int], cache_salt: str | None) -> int:
        """The cost in characters to tokenise, or ids to check; characters of cached prefixes count a sixteenth."""
        known = self.input_processor.prefix_tokens
        if len(prompt) < _LONG_PROMPT or known is None or cache_salt is not None or not isinstance(prompt, str):
            return len(prompt)
        return known.num_new_chars(prompt) + len(prompt) // 16

    async def run_in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run work that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, stream: OutputStream, tenant: Tenant | None = None
    ) -> None:
        """Send a prepared request to the core; its outputs go to ``stream``. Raises EngineDeadError, or ValueError when
        its id is in use."""
        if self.dead is not None:
            raise self.dead
        if not self.output_processor.requests:
            self._work_since = time.monotonic()
        self.output_processor.add_request(request, prompt, stream, tenant)
        if self.tracer is not None:
            self.tracer.begin(request.request_id)
        try:
            self.client.add_request(request)
        except Exception:
            self.output_processor.abort_requests([request.request_id])
            raise

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Read an adapter, which is returned with its digest. Raises ModelError, EngineDeadError."""
        if self.dead is not None:
            raise self.dead
        answer = await self.client.load_adapter(adapter)
        if answer.error is not None:
            raise ModelError(answer.error)
        return answer.adapter

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, wherever they are; unknown or finished ones are ignored."""
        stats = self._new_stats()
        known = self.output_processor.abort_requests(request_ids, stats=stats)
        if known and stats is not None:
            self._record(stats)
        if known and self.dead is None:
            self.client.abort_requests(known)

    def abort_all(self) -> None:
        """End every request."""
        self.abort(list(self.output_processor.requests))

    # -- results of the core -----------------------------------------------------------------------------------------

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        before = self.output_processor.num_unfinished_samples
        stats = self._new_stats()
        _, stopped = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
        if finished := before - self.output_processor.num_unfinished_samples:
            self._finish_times.extend([time.monotonic()] * finished)
        if outputs.stats is not None:
            self.last_stats = outputs.stats
        if stats is not None and outputs.outputs:
            self._record(stats)
        if self.metrics is not None and outputs.stats is not None:
            self.metrics.record_step(outputs.stats)
        if self.load_log is not None and stats is not None and outputs.outputs:
            self.load_log.record(outputs.stats, stats)
        if stopped and self.dead is None:
            self.client.finish_samples(stopped)

    def _record(self, stats: IterationStats) -> None:
        if self.metrics is not None:
            self.metrics.record_iteration(stats)
        if self.tracer is not None:
            self.tracer.record(stats)

    def _new_stats(self) -> IterationStats | None:
        return None if self.metrics is None else IterationStats()

    def _core_exited(self, code: int) -> None:
        self.dead = EngineDeadError(f"the engine core {describe_exit(code)}; see its log")
        if not self._closing and self.ready is not None:  # before that `wait_ready` says why
            logger.error("%s", self.dead)
        for state in list(self.output_processor.requests.values()):
            if state.queue is not None:
                state.queue.put_error(self.dead)
        self.output_processor.clear()
        self.core_exited.set()

    def fail_frozen(self, seconds: float) -> None:
        """End the requests of cores that have sent no heartbeat for so long: their readers get an EngineDeadError.
        A core that goes on is told, and serves again."""
        silent = self.seconds_since_beat()
        if silent <= seconds:
            return
        error = EngineDeadError(f"the engine core has been frozen for {silent:.0f} s: no heartbeat")
        self.client.fail_questions(error)
        frozen = self.client.frozen_requests(self.output_processor.requests, seconds)
        if not frozen:
            return
        logger.error("%s; %d requests end", error, len(frozen))
        states = [self.output_processor.requests[request_id] for request_id in frozen]
        queues = {state.queue for state in states if state.queue is not None}
        for state in states:
            state.queue = None  # a last output would pass for an answer
        stats = self._new_stats()
        self.output_processor.abort_requests(frozen, "error", str(error), stats)
        if stats is not None:
            self._record(stats)
        for queue in queues:
            queue.put_error(error)
        self.client.abort_requests(frozen)

    # -- health ------------------------------------------------------------------------------------------------------

    def seconds_since_beat(self) -> float:
        """Seconds since the core process's last heartbeat."""
        return self.client.heartbeat.seconds_since_beat()

    def silent_ranks(self, seconds: float) -> list[int]:
        """The ranks, of several, without a heartbeat for that many seconds."""
        beats = self.client.process.heartbeats
        return [rank for rank, beat in enumerate(beats) if beat.seconds_since_beat() > seconds and len(beats) > 1]

    def seconds_stalled(self) -> float:
        """Seconds since the core last finished a step, while it has work."""
        if not self.output_processor.requests:
            return 0.0
        return min(self.client.heartbeat.seconds_since_progress(), time.monotonic() - self._work_since)

    def seconds_until_room(self, excess: int) -> float:
        """Estimate the seconds, 60 at most and 1 where nothing is known, until ``excess`` sequences have finished at
        the recent pace."""
        if len(self._finish_times) < 2:
            return 1.0
        span = time.monotonic() - self._finish_times[0]
        return min(60.0, excess * span / len(self._finish_times))

    def close(self, grace: float = 5.0) -> None:
        """End the core. Unfinished requests end with EngineDeadError."""
        self._closing = True
        if self.load_log is not None:
            self.load_log.close()
        if self.tracer is not None:
            self.tracer.close()
        self.client.close(grace)
        if self.dead is None:
            self._core_exited(0)
        self._threads.shutdown(wait=False, cancel_futures=True)
