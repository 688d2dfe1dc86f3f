"""Alerts in a real Prometheus that scrapes a real engine: they fire when it happens, and resolve when it is over.

Alerts wait a minute and more before they fire; here they wait two seconds. OCTAVO_REAL_DURATIONS=1 lets them wait.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import prometheus
from clusterrig.fixtures import eventually
from clusterrig.prometheus import Prometheus

RULES = Path(__file__).parents[2] / "charts/octavo/files/alerts.yaml"
PATIENCE = 150 if os.environ.get("OCTAVO_REAL_DURATIONS") else 30
# A signal handler that sleeps: the core's main loop hangs while its other threads live on.
STALL_ON_SIGNAL = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(10))\n"

pytestmark = pytest.mark.slow


def rules(folder: Path) -> Path:
    text = RULES.read_text()
    if not os.environ.get("OCTAVO_REAL_DURATIONS"):
        text = re.sub(r"for: \d+m", "for: 2s", text).replace("[1m]", "[5s]")
    out = folder / "alerts.yaml"
    out.write_text(text)
    return out


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "sitecustomize.py").write_text(STALL_ON_SIGNAL)
    flags = ["--max-num-seqs", "1", "--max-num-queued-reqs", "200", "--health-stall-seconds", "3"]
    with Engine(folder, *flags, "--watchdog-seconds", "300", env={"PYTHONPATH": str(folder)}) as one:
        yield one


@pytest.fixture(scope="module")
def watching(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if prometheus.programs() is None:
        pytest.skip("no Prometheus here, and none to be had by apt-get; PROMETHEUS_BIN=FOLDER names one")
    folder = tmp_path_factory.mktemp("prometheus")
    labels = {"namespace": "models", "llmdeployment": "tiny", "pod": "tiny-0"}
    job = {"job_name": "engine", "static_configs": [{"targets": [engine.metrics_address], "labels": labels}]}
    interval = "5s" if os.environ.get("OCTAVO_REAL_DURATIONS") else "1s"
    with Prometheus(folder, [job], rules(folder), interval) as one:
        eventually(lambda: one.up().get(engine.metrics_address))
        yield one


def fires(one: Prometheus, name: str) -> dict[str, str]:
    return dict(eventually(lambda: one.alerts(name), PATIENCE)[0]["annotations"])


def resolves(one: Prometheus, name: str) -> None:
    eventually(lambda: not one.alerts(name) and not one.alerts(name, "pending"), PATIENCE)


def test_a_long_queue(engine: Engine, watching: Prometheus) -> None:
    assert not watching.alerts("OctavoQueueLong")
    crowd = engine.crowd(150, max_tokens=1000)
    words = fires(watching, "OctavoQueueLong")
    assert re.fullmatch(r"1\d\d requests wait for tiny", words["summary"])
    assert "models/tiny" in words["description"]
    engine.hang_up()
    resolves(watching, "OctavoQueueLong")
    for thread in crowd:
        thread.join(90)
    assert engine.complete("still there?") == 200


def test_a_stalled_engine(engine: Engine, watching: Prometheus) -> None:
    assert not watching.alerts("OctavoEngineStalled")
    engine.crowd(50, max_tokens=1000)  # one after the other: one alone may have ended when the signal comes
    time.sleep(0.3)
    os.kill(engine.core_pid, signal.SIGUSR1)
    words = fires(watching, "OctavoEngineStalled")
    assert "models/tiny-0" in words["description"]
    engine.hang_up()
    resolves(watching, "OctavoEngineStalled")
    assert engine.complete("still there?") == 200
