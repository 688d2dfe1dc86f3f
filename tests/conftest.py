"""Shared by all suites: hypothesis profiles and the models that tests run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton's kernels run on the CPU in tests, in its interpreter; tests on a GPU set 0. Triton reads this when it is first
# imported, which transformers does too.
os.environ.setdefault("TRITON_INTERPRET", "1")

import octavo  # noqa: F401  (sets how OpenMP waits, before torch is loaded)

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and type Ctrl-C to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("heavy", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random checkpoints made by transformers, one a family (see support.tiny_models)."""
    from support.tiny_models import save_all

    return save_all(tmp_path_factory.mktemp("checkpoints"))
