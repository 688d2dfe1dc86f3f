"""The executor of one worker, in the engine's own process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.interface.lora import Adapter
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput

if TYPE_CHECKING:
    from octavo.executor.lock_step import LockStep
    from octavo.worker.request_states import RequestStates


class Executor(Protocol):
    """The interface through which the engine runs its workers."""

    @property
    def config(self) -> EngineConfig:
        """The configuration as given, with what depends on the device (max_model_len) filled in."""

    @property
    def num_blocks(self) -> int:
        """KV cache blocks, the null block included."""

    @property
    def kv_layout(self) -> KVCacheLayout:
        """The layout of keys and values in these blocks."""

    @property
    def prefix_cache_blocks(self) -> int | None:
        """The number of blocks that the prefix cache may touch; None: all. See `octavo.core.block_pool.BlockPool`."""

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights in memory, by kind ("int4", "bfloat16")."""

    @property
    def memory_shares(self) -> dict[str, int]:
        """Bytes of the memory that the engine may use, by what they are for."""

    @property
    def recording_obstacle(self) -> str | None:
        """The obstacle to recording a CPU's steps; None: there is none, or no CPU."""

    @property
    def max_in_flight(self) -> int:
        """Maximum number of steps that are started and not read back."""

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step; what is returned waits for its results."""

    def is_lost(self) -> bool:
        """True if the device can run no further step; to be called after one has failed."""

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Compile in the background; the future raises ValueError when the grammar cannot be used."""

    def release_grammar(self, prepared: Future[None]) -> None:
        """Release a grammar; called once the request that it was prepared for has ended."""

    def poll_grammars(self, seconds: float) -> set[str]:
        """Complete the futures of grammars that are compiled, waiting at most ``seconds`` for one. Returns the
        sequences that no step should include yet: their grammars' bitmasks are slow and not ready."""

    def load_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """Read a LoRA adapter in the background; the future has it with its digest. It raises ModelError for one that
        cannot be used."""


class UniProcExecutor:
    """Runs one `Worker`; see `Executor`."""

    def __init__(
        self, config: EngineConfig, overlap: bool = False, lock_step: LockStep | None = None, **rank: Any
    ) -> None:
        """``overlap``: let steps overlap on a CPU too, with the runner of GPUs; ``lock_step``: with engines that have
        other experts; ``rank``: see `Worker`."""
        from octavo.worker.worker import Worker

        self._lock_step = lock_step
        if lock_step is not None:
            from octavo.layers.parallel import TensorParallel

            rank["tp"] = TensorParallel(expert_parallel=True, replicas=lock_step.share_memory())
        self.worker = Worker(config, overlap, **rank)
        self._describe()

    def _describe(self) -> None:
        self.config = self.worker.config
        self.num_blocks = self.worker.ledger.num_blocks
        self.kv_layout = self.worker.ledger.layout
        self.prefix_cache_blocks = self.worker.ledger.prefix_cache_blocks
        self.weight_bytes = self.worker.model.weight_bytes_by_kind()
        self.memory_shares = self.worker.ledger.shares()
        self.max_in_flight = self.worker.steps_in_flight

    @property
    def recording_obstacle(self) -> str | None:
        """See `Executor`; some are known once a step has run."""
        return self.worker.runner.recording_obstacle

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step. In lock step with others it may have no tokens here; raises RuntimeError when one is lost."""
        self.worker.cut_drafts(step)
        if self._lock_step is None:
            return self.worker.execute_model(step)
        step.rows_of_replicas = self._lock_step.begin_step(step.total_num_scheduled_tokens)
        if not any(step.rows_of_replicas):
            return ModelRunnerOutput
        pending, replicas = self.worker.execute_model(step), self.worker.tp.replicas
        assert replicas is not None
        replicas.check()
        return pending

    def is_lost(self) -> bool:
        """CUDA's context may be spoilt: an illegal access, for one, makes each later call raise. Engines in lock step
        are in the middle of a step that has failed here."""
        if self._lock_step is not None:
            return True
        if self.config.device != "cuda":
            return False
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def load_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """See `Executor`."""
        assert self.worker.adapters is not None
        return self.worker.adapters.load(adapter)

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Compile in the background."""
        return self._requests().grammar_pool.prepare(grammar)

    def release_grammar(self, prepared: Future[None]) -> None:
        """Release a compiled grammar."""
        self._requests().grammar_pool.release(prepared)

    def poll_grammars(self, seconds: float) -> set[str]:
        """Complete the futures of compiled grammars."""
        requests = self._requests()
        requests.grammar_pool.poll(seconds)
        return requests.grammars.held()

    def _requests(self) -> RequestStates:
        requests: RequestStates = self.worker.runner.requests  # type: ignore[union-attr]  # an encoder has no grammars
        return requests
