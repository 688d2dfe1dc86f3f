"""Runs the one worker in this process. Executors of several processes will offer the same three things."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from octavo.config import EngineConfig
from octavo.core.sched_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    @property
    def config(self) -> EngineConfig:
        """As asked for, with what the device decided (max_model_len) filled in."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV cache blocks, the null block included."""
        ...

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput: ...

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Compile in the background; the future carries a ValueError when it cannot be used."""
        ...


class UniProcExecutor:
    def __init__(self, config: EngineConfig) -> None:
        from octavo.worker.worker import Worker

        self.worker = Worker(config)
        self.config = self.worker.config
        self.num_blocks = self.worker.ledger.num_blocks

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(step)

    def prepare_grammar(self, grammar: str) -> Future[None]:
        return self.worker.runner.grammar_compiler.prepare(grammar)
