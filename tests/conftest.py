"""Shared by all suites: hypothesis profiles and the models that tests run."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from support.examples import FACTOR, examples_of
from support.sampling import Case, draw_of_commit, sample, share_of
from support.turns import turn

# Triton's kernels run on the CPU in tests, in its interpreter; tests on a GPU set 0. Triton reads this when it is first
# imported, which transformers does too.
os.environ.setdefault("TRITON_INTERPRET", "1")

import octavo  # noqa: F401  (sets how OpenMP waits, before torch is loaded)

# Servers keep responses in a file of the user's, unless they are told where: those of tests do not.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="octavo-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and type Ctrl-C to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
# Which share of its cases a test runs that is `sampled` by shares: every commit another one, all runs of it the same.
DRAW = int(os.environ.setdefault("OCTAVO_TEST_DRAW", str(draw_of_commit(Path(__file__).parents[1]))))

SAMPLES_ALL = (
    os.environ.get("OCTAVO_TEST_SAMPLES_ALL") == "1"
)  # as `make coverage` does: lines are reached by few cases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_long(items)
    multiply_examples(items)


def leave_to_long(items: list[pytest.Item]) -> None:
    """Mark as `long` what the samples of tests that are `sampled` (where SAMPLES_ALL: all of them) leave out.

    Where cases are many alike, each commit runs one ``share``-th of the sample, and each test another one.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") or (SAMPLES_ALL and hasattr(item, "callspec")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sampled")
        wanted = marker.kwargs if marker else {}
        chosen = sample({item.nodeid: case_of(item) for item in cases}, wanted.get("strength", 1))
        chosen = share_of(chosen, wanted.get("share", 1), DRAW)
        for item in cases:
            if item.nodeid not in chosen:
                item.add_marker(pytest.mark.long)


def case_of(item: pytest.Item) -> Case:
    """What is chosen for each list of parameters: those that are listed together are one choice."""
    params = {name: _shown(value) for name, value in item.callspec.params.items()}
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [[name.strip() for name in (names.split(",") if isinstance(names, str) else names)] for names in lists]
    case = {",".join(names): ",".join(params.pop(name, "") for name in names) for names in together}
    return case | params


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # of an integer of thousands of digits
        return str(id(value))


def multiply_examples(items: list[pytest.Item]) -> None:
    """Multiply every property's examples by FACTOR, also where the test names its own number."""
    if FACTOR == 1:
        return
    functions = [item for item in items if isinstance(item, pytest.Function)]
    for test in {getattr(item.obj, "__func__", item.obj) for item in functions}:
        if is_hypothesis_test(test) and not hasattr(test, "_hypothesis_state_machine_class"):
            own = getattr(test, "_hypothesis_internal_use_settings", settings.default)
            test._hypothesis_internal_use_settings = settings(own, max_examples=examples_of(own.max_examples))
    for machine in {item.cls for item in functions if issubclass(item.cls or object, unittest.TestCase)}:
        machine.settings = settings(machine.settings, max_examples=examples_of(machine.settings.max_examples))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Nothing runs beside a test that is marked `alone`, though several workers run tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with turn(item.config.rootpath / ".pytest_cache", alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random checkpoints made by transformers, one a family (see support.tiny_models)."""
    from support.tiny_models import save_all

    return save_all(tmp_path_factory.mktemp("checkpoints"))
