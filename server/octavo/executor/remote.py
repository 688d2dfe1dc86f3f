"""The executor of one worker in a process of its own: `RemoteExecutor` sends it steps and is sent their results, and
`serve` is the other side."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octavo import errors
from octavo.errors import ModelError, OctavoError
from octavo.executor.rank_processes import RankProcesses
from octavo.executor.ranks import WATCH_SECONDS
from octavo.executor.uniproc import Executor, UniProcExecutor
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.interface.lora import Adapter, AdapterAnswer
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.system.channel import Channel, Kind
from octavo.system.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.005  # between two looks at grammars and adapters that are being prepared, while there is no step


@dataclass
class Started:
    """The worker's message once it is ready; see `Executor`."""

    config: dict[str, Any]
    num_blocks: int
    kv_layout: KVCacheLayout
    prefix_cache_blocks: int | None
    weight_bytes: dict[str, int]
    memory_shares: dict[str, int]
    max_in_flight: int
    recording_obstacle: str | None


@dataclass
class Result:
    """The result of one step: its output, or why it failed."""

    step_id: int
    recording_obstacle: str | None
    output: ModelRunnerOutput | None = None
    error: str = ""
    out_of_memory: bool = False
    is_lost: bool = False


@dataclass
class GrammarNews:
    """Grammars by the numbers they were sent with, and what is wrong with those that cannot be used; and the sequences
    that wait for their masks, see `Executor.poll_grammars`."""

    done: list[tuple[int, str | None]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)


class RemoteExecutor:
    """See `Executor`."""

    def __init__(self, config: EngineConfig, ranks: RankProcesses) -> None:
        """``ranks``: the worker's process alone. Raises ConfigError and ModelError."""
        import msgspec

        self._ranks, (self._rank,) = ranks, ranks.processes
        self._close = weakref.finalize(self, ranks.close)
        self._encode, decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder
        self._decode_result, self._decode_news = decoder(Result).decode, decoder(GrammarNews).decode
        self._decode_answer = decoder(AdapterAnswer).decode
        self._results: deque[Result] = deque()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[None]] = {}  # of grammars
        self._adapters: deque[Future[Adapter]] = deque()  # being read; answers come in that order
        self._held: set[str] = set()
        self._is_lost = False
        ranks.timeout = config.parallel.distributed_timeout_seconds
        ranks.configure(config)
        try:
            started = self._wait_started()
        except RuntimeError as error:
            self._close()
            raise OctavoError(str(error)) from error
        except BaseException:
            self._close()
            raise
        self.config = EngineConfig.from_dict(started.config)
        self.num_blocks, self.kv_layout = started.num_blocks, started.kv_layout
        self.prefix_cache_blocks = started.prefix_cache_blocks
        self.weight_bytes, self.memory_shares = started.weight_bytes, started.memory_shares
        self.max_in_flight, self.recording_obstacle = started.max_in_flight, started.recording_obstacle

    def _wait_started(self) -> Started:
        import msgspec

        while True:
            for kind, payload in self._ranks.read(self._rank):
                if kind is Kind.FAILED:
                    name, text = msgspec.msgpack.decode(payload, type=tuple[str, str])
                    raise getattr(errors, name)(text)
                return msgspec.msgpack.decode(payload, type=Started)
            self._ranks.check()
            self._rank.channel.wait(WATCH_SECONDS)

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step. Raises RuntimeError, as what it returns does, when it fails or the process is lost."""
        self._ranks.begin_step(step.step_id)
        self._ranks.send(Kind.STEP, self._encode(step))
        return partial(self._wait, step.step_id)

    def _wait(self, step_id: int) -> ModelRunnerOutput:
        while (result := self._next_result()).step_id != step_id:
            self._ranks.end_step()  # that was interrupted here
        self._ranks.end_step()
        if result.output is not None:
            return result.output
        self._is_lost = result.is_lost
        raise MemoryError(result.error) if result.out_of_memory else RuntimeError(result.error)

    def _next_result(self) -> Result:
        while not self._results:
            self._take()
            if not self._results:
                self._ranks.check()
                self._rank.channel.wait(WATCH_SECONDS)
        return self._results.popleft()

    def _take(self) -> None:
        for kind, payload in self._ranks.read(self._rank):
            if kind is Kind.RESULT:
                self._results.append(self._decode_result(payload))
                self.recording_obstacle = self._results[-1].recording_obstacle
            elif kind is Kind.ADAPTER:
                answer, loading = self._decode_answer(payload), self._adapters.popleft()
                if answer.error is None:
                    loading.set_result(answer.adapter)
                else:
                    loading.set_exception(ModelError(answer.error))
            else:
                news = self._decode_news(payload)
                self._held = news.held
                for number, problem in news.done:
                    future = self._futures.get(number)  # None: released already
                    if future is not None and problem is None:
                        future.set_result(None)
                    elif future is not None:
                        future.set_exception(ValueError(problem))

    def load_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """See `Executor`."""
        self._ranks.send(Kind.LOAD_ADAPTER, self._encode(adapter))
        self._adapters.append(_Awaited(self._take, self._wait_for_news))
        return self._adapters[-1]

    def _wait_for_news(self) -> None:
        self._ranks.check()
        self._rank.channel.wait(WATCH_SECONDS)

    def is_lost(self) -> bool:
        """See `Executor`."""
        return self._is_lost or self._ranks.lost is not None

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """See `Executor`."""
        number, future = next(self._numbers), Future[None]()
        self._futures[number] = future
        self._ranks.send(Kind.GRAMMAR, self._encode((number, grammar)))
        return future

    def release_grammar(self, prepared: Future[None]) -> None:
        """See `Executor`."""
        number = next(number for number, future in self._futures.items() if future is prepared)
        del self._futures[number]
        self._ranks.send(Kind.GRAMMAR, self._encode((number, None)))

    def poll_grammars(self, seconds: float) -> set[str]:
        """See `Executor`."""
        if seconds:
            self._rank.channel.wait(seconds)
        self._take()
        return self._held


class _Awaited(Future[Adapter]):
    """A future of the other process's: whoever asks for it takes what that process has sent."""

    def __init__(self, take: Callable[[], None], wait: Callable[[], None]) -> None:
        super().__init__()
        self._take, self._wait = take, wait

    def done(self) -> bool:
        """See `Future`."""
        if not super().done():
            self._take()
        return super().done()

    def result(self, timeout: float | None = None) -> Adapter:
        """See `Future`; waits without end. Raises RuntimeError when the process is lost."""
        while not self.done():
            self._wait()
        return super().result()


def serve(config: EngineConfig, channel: Channel, heartbeat: Heartbeat) -> None:
    """Run what a `RemoteExecutor` sends until its process has ended. Raises EOFError then."""
    import msgspec

    encode = msgspec.msgpack.Encoder().encode
    try:
        executor = UniProcExecutor(config)
    except OctavoError as error:
        channel.send(Kind.FAILED, encode((type(error).__name__, str(error))))
        channel.flush(2.0)
        return
    gc.collect()
    gc.freeze()
    gc.enable()
    started = Started(
        executor.config.to_dict(),
        executor.num_blocks,
        executor.kv_layout,
        executor.prefix_cache_blocks,
        executor.weight_bytes,
        executor.memory_shares,
        executor.max_in_flight,
        executor.recording_obstacle,
    )
    channel.send(Kind.READY, encode(started))
    decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
    decode_grammar = msgspec.msgpack.Decoder(tuple[int, str | None]).decode
    steps: deque[SchedulerOutput] = deque()
    in_flight: deque[tuple[int, PendingOutput, Callable[[], bool]]] = deque()
    grammars, adapters, num_steps = _Grammars(executor), _Adapters(executor), 0
    while True:
        if not steps and not in_flight:
            channel.wait(_LOOK_SECONDS if grammars.is_waiting or adapters.is_waiting else None)
        elif not steps:
            channel.wait_unless(in_flight[0][2])  # as the next step is launched before these results are waited for
        for kind, payload in channel.receive():
            if kind is Kind.STEP:
                steps.append(decode_step(payload))
            elif kind is Kind.LOAD_ADAPTER:
                adapters.take(payload)
            else:
                grammars.take(*decode_grammar(payload))
        _tell(channel, grammars, adapters)
        if steps:
            step = steps.popleft()
            in_flight.append((step.step_id, *_start(executor, step)))
            if len(in_flight) < executor.max_in_flight:
                continue
        elif in_flight and not in_flight[0][2]():
            continue  # something else came
        if in_flight:
            result = _finish(executor, *in_flight.popleft()[:2])
            _tell(channel, grammars, adapters)
            channel.send(Kind.RESULT, encode(result))
            num_steps += 1
            heartbeat.progress(num_steps)


def _tell(channel: Channel, grammars: _Grammars, adapters: _Adapters) -> None:
    import msgspec

    if (news := grammars.poll()) is not None:
        channel.send(Kind.GRAMMARS, msgspec.msgpack.encode(news))
    for answer in adapters.poll():
        channel.send(Kind.ADAPTER, msgspec.msgpack.encode(answer))


def _start(executor: UniProcExecutor, step: SchedulerOutput) -> tuple[PendingOutput, Callable[[], bool]]:
    """The step's results, and whether they can be had without waiting."""
    try:
        return executor.execute_model(step), executor.worker.when_done()
    except Exception as error:
        failed = error  # a name that outlives this block

        def raise_it() -> ModelRunnerOutput:
            raise failed

        return raise_it, lambda: True


def _finish(executor: Executor, step_id: int, pending: PendingOutput) -> Result:
    try:
        return Result(step_id, executor.recording_obstacle, pending())
    except Exception as error:
        logger.exception("step %d failed", step_id)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        return Result(
            step_id,
            executor.recording_obstacle,
            error=str(error) or type(error).__name__,
            out_of_memory=bool(kinds & {"OutOfMemoryError", "MemoryError"}),
            is_lost=executor.is_lost(),
        )


class _Grammars:
    """The grammars that the other side has prepared, by its numbers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._prepared: dict[int, Future[None]] = {}
        self._waiting: set[int] = set()  # not compiled yet
        self._held: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """True if there will be news without a step."""
        return bool(self._waiting or self._held)

    def take(self, number: int, grammar: str | None) -> None:
        """Prepare grammar ``number``; None: release it."""
        if grammar is not None:
            self._prepared[number] = self._executor.prepare_grammar(grammar)
            self._waiting.add(number)
        else:
            self._waiting.discard(number)
            self._executor.release_grammar(self._prepared.pop(number))

    def poll(self) -> GrammarNews | None:
        """Return the news since the last call; None if there is none."""
        if not self._prepared and not self._held:
            return None
        held, before = self._executor.poll_grammars(0.0), self._held
        done = [number for number in self._waiting if self._prepared[number].done()]
        self._waiting.difference_update(done)
        self._held = held
        if not done and held == before:
            return None
        return GrammarNews([(number, _problem(self._prepared[number])) for number in done], held)


class _Adapters:
    """The adapters that the other side has asked for."""

    def __init__(self, executor: Executor) -> None:
        import msgspec

        self._executor, self._decode = executor, msgspec.msgpack.Decoder(Adapter).decode
        self._loading: deque[tuple[Adapter, Future[Adapter]]] = deque()

    @property
    def is_waiting(self) -> bool:
        """True if there will be answers without a step."""
        return bool(self._loading)

    def take(self, payload: bytearray) -> None:
        """Start reading the adapter in ``payload``."""
        adapter = self._decode(payload)
        self._loading.append((adapter, self._executor.load_adapter(adapter)))

    def poll(self) -> Iterator[AdapterAnswer]:
        """Yield the adapters that have been read, in the order of their requests."""
        while self._loading and self._loading[0][1].done():
            adapter, loading = self._loading.popleft()
            error = loading.exception()
            if error is not None and not isinstance(error, OctavoError):
                logger.error("adapter %r could not be loaded", adapter.name, exc_info=error)
            yield AdapterAnswer(loading.result()) if error is None else AdapterAnswer(adapter, f"{error}")


def _problem(prepared: Future[None]) -> str | None:
    error = prepared.exception()
    return None if error is None else str(error)
