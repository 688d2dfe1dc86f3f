"""The executor of several ranks: rank 0's worker is in the engine's own process, the others' in processes of theirs."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from octavo.errors import ConfigError, OctavoError
from octavo.executor.nodes import NodeRanks
from octavo.executor.rank_processes import RankProcesses
from octavo.executor.ranks import Ranks
from octavo.executor.ray_placement import Placement
from octavo.executor.remote import RemoteExecutor
from octavo.executor.token_sums import TokenSum
from octavo.executor.uniproc import Executor, UniProcExecutor
from octavo.interface.engine_config import EngineConfig
from octavo.interface.lora import Adapter
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.system.channel import Kind


def make_executor(config: EngineConfig, ranks: Ranks | None = None) -> Executor:
    """The executor that ``config`` asks for; ``ranks``: started already. Raises ConfigError and ModelError."""
    if ranks is None:
        config, ranks = start_ranks(config)
    if ranks is None:
        return UniProcExecutor(config)
    if config.parallel.world_size == 1:
        assert isinstance(ranks, RankProcesses)
        return RemoteExecutor(config, ranks)
    return MultiprocExecutor(config, ranks)


def start_ranks(
    config: EngineConfig, heartbeats: int | None = None, local: RankProcesses | None = None
) -> tuple[EngineConfig, Ranks | None]:
    """The processes that the engine has beside its own (None: none), and ``config`` with where Ray has placed them.
    ``heartbeats``: see `RankProcesses`; ``local``: those here that are started already. Raises ConfigError."""
    placement: Placement | None = None
    if config.parallel.distributed_executor_backend == "ray":
        placement = Placement(config)
        config = placement.config
    parallel = config.parallel
    count = parallel.ranks_per_node
    if (parallel.world_size > 1 or parallel.distributed_executor_backend == "mp") and find_spec("msgspec") is None:
        raise ConfigError(  # octavo.LLM of one rank does without it
            "processes exchange messages with the package msgspec, which is not installed: pip install msgspec, or "
            "give one rank, in the engine's own process"
        )
    if count > 1 and local is None:
        local = RankProcesses(range(1, count), heartbeats)
    if parallel.nnodes > 1:
        try:
            return config, NodeRanks(config, heartbeats, local, placement)
        except BaseException:
            for started in (local, placement):
                if started is not None:
                    started.close()
            raise
    if parallel.world_size == 1 and parallel.distributed_executor_backend == "mp":
        local = RankProcesses(range(1), heartbeats)
    if placement is not None and local is not None:
        local.on_close = placement.close
    return config, local


class MultiprocExecutor(UniProcExecutor):
    """See `Executor`. Every rank is sent the same steps, and those of the last stage sample, each for itself; the
    outputs of the first of them count.

    A step that fails on one rank leaves the others in the middle of it: then the engine ends.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._close = weakref.finalize(self, self._ranks.close)
        try:
            self._start(config)
        except RuntimeError as error:  # a rank was lost, which others have noticed as well
            self._ranks.wait_for_news()
            self._close()
            raise OctavoError(self._ranks.lost or str(error)) from error
        except BaseException:
            self._close()
            raise
        self._total = TokenSum()

    def _start(self, config: EngineConfig) -> None:
        import msgspec

        from octavo.worker.grammars.shared_masks import LeadingGrammars
        from octavo.worker.stage import Pipes

        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_results = msgspec.msgpack.Decoder(ModelRunnerOutput).decode
        ranks, self._samples = self._ranks, config.parallel.first_of_last_stage
        ranks.timeout = config.parallel.distributed_timeout_seconds
        self._place = ranks.place = place = ranks.open_place(config)
        ranks.check()  # of one that was lost before there was a place, nobody has told it
        super().__init__(
            config,
            tp=place.tp,
            agree=place.world.smallest,
            make_grammars=partial(LeadingGrammars, send=partial(ranks.send, Kind.MASK, first=max(1, self._samples))),
            pipes=Pipes(place.before, place.after, self._results),
        )
        ranks.wait_ready()

    def _results(self) -> ModelRunnerOutput:
        """Read the oldest step's results from the rank of the last stage that reports them."""
        return self._decode_results(self._ranks.next_results(self._samples))

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step on all ranks. Raises RuntimeError, as what it returns does, when a rank is lost."""
        ranks = self._ranks
        ranks.check()
        self.worker.cut_drafts(step)
        ranks.begin_step(step.step_id)
        alone = self._place.tp.size == 1  # on the stage that encodes images, whose pixels are large
        ranks.send(Kind.STEP, self._encode(replace(step, encoder_inputs=[]) if alone else step))
        try:
            pending = self.worker.execute_model(step)
        except RuntimeError as error:
            raise self._explained(error) from error
        except BaseException as error:
            self._lose_by(error)
            raise

        def wait() -> ModelRunnerOutput:
            try:
                output = pending()
                self._place.check()
            except RuntimeError as error:
                raise self._explained(error) from error
            except BaseException as error:
                self._lose_by(error)
                raise
            ranks.end_step()
            if self._total.add(output):
                self._total.compare(ranks.sums())
            return output

        return wait

    def load_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """Have every rank read its part, which takes all of them about as long: what the first one says counts, and
        another one that is behind is waited for in the step that needs the adapter."""
        self._ranks.send(Kind.LOAD_ADAPTER, self._encode(adapter))
        return super().load_adapter(adapter)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """``error``, or the rank whose end is behind it."""
        self._ranks.wait_for_news()
        return RuntimeError(self._ranks.lost) if self._ranks.lost else error

    def _lose_by(self, error: BaseException) -> None:
        """Lose the ranks after an interrupt (a second Ctrl-C, for one), so that no later step is mistaken for the one
        under way."""
        if not isinstance(error, Exception):
            self._ranks.lose(f"a step of the ranks was interrupted ({type(error).__name__}): start the engine anew")

    def is_lost(self) -> bool:
        """True: after any failure the other ranks are in the middle of the step."""
        return True
