"""With OCTAVO_TEST_EXECUTOR=mp the whole suite computes its models in processes of their own, as
`--distributed-executor-backend mp` does. Tests that look into a worker are skipped then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from octavo.engine import core
from octavo.executor.multiproc import make_executor
from octavo.executor.remote import RemoteExecutor
from octavo.interface.engine_config import EngineConfig

BACKEND = os.environ.get("OCTAVO_TEST_EXECUTOR")


def _skip(executor: RemoteExecutor) -> Any:
    pytest.skip("looks into the worker, which is in a process of its own")


@pytest.fixture(autouse=True, scope="module")
def executor_backend() -> Iterator[None]:
    if BACKEND is None:
        yield
        return

    def make(config: EngineConfig, ranks: Any = None) -> Any:
        parallel = replace(config.parallel, distributed_executor_backend=BACKEND)
        return make_executor(replace(config, parallel=parallel), ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "make_executor", make)
        patch.setattr(RemoteExecutor, "worker", property(_skip), raising=False)
        yield
