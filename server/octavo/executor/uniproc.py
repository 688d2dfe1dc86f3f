"""Runs the one worker in this process. Executors of several processes will offer the same three things."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from octavo.interface.engine_config import EngineConfig
from octavo.interface.step import PendingOutput, SchedulerOutput


class Executor(Protocol):
    @property
    def config(self) -> EngineConfig:
        """As asked for, with what the device decided (max_model_len) filled in."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV cache blocks, the null block included."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Steps that may have been handed out before the first one's results are asked for."""
        ...

    def execute_model(self, step: SchedulerOutput) -> PendingOutput: ...

    def is_lost(self) -> bool:
        """Whether the device can run no further step; to be asked after one has failed."""
        ...

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Compile in the background; the future carries a ValueError when it cannot be used."""
        ...

    def release_grammar(self, prepared: Future[None]) -> None:
        """The request that a grammar was prepared for has ended."""
        ...

    def poll_grammars(self, seconds: float) -> set[str]:
        """Complete the futures of what is compiled; waits so long for something to be. Returns the sequences whose next
        tokens are not known yet and which no step should wait for."""
        ...


class UniProcExecutor:
    def __init__(self, config: EngineConfig, overlap: bool | None = None) -> None:
        """``overlap``: let steps overlap (None: where the device has a queue of its own)."""
        from octavo.worker.worker import Worker

        self.worker = Worker(config, overlap)
        self.config = self.worker.config
        self.num_blocks = self.worker.ledger.num_blocks
        self.max_in_flight = self.worker.max_in_flight

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        return self.worker.execute_model(step)

    def is_lost(self) -> bool:
        if self.config.device != "cuda":
            return False
        import torch

        try:
            torch.cuda.synchronize()  # an illegal access, for one, spoils the context: each later call raises again
        except RuntimeError:
            return True
        return False

    def prepare_grammar(self, grammar: str) -> Future[None]:
        return self.worker.runner.grammar_pool.prepare(grammar)

    def release_grammar(self, prepared: Future[None]) -> None:
        self.worker.runner.grammar_pool.release(prepared)

    def poll_grammars(self, seconds: float) -> set[str]:
        self.worker.runner.grammar_pool.poll(seconds)
        return self.worker.runner.grammars.held()
