"""Dashboards: laid out for people, found by Grafana's sidecar, and every query gives something to draw."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import dashboards
from support.chart_values import published
from support.dashboards import BOARDS, metric_names, panels, queries
from support.serving import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries, prometheus
from clusterrig.fixtures import eventually
from clusterrig.prometheus import Prometheus

CHART = Path(__file__).parents[2] / "charts/octavo"
RULES = CHART / "files/alerts.yaml"


def expressions_of_alerts() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_share_the_screen(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells
    bottom = max(y for _, y in taken) + 1
    assert {y for _, y in taken} == set(range(bottom)), "an empty line"
    assert len({panel["id"] for panel in BOARDS[name]["panels"]}) == len(BOARDS[name]["panels"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_they_show_and_in_which_unit(name: str) -> None:
    for panel in panels(name):
        assert panel["title"] and panel["description"], panel
        if panel["type"] not in ("table", "state-timeline", "heatmap"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"], panel["title"]
    assert len({panel["title"] for panel in panels(name)}) == len(list(panels(name)))


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_used_and_defined(name: str) -> None:
    defined = [variable["name"] for variable in BOARDS[name]["templating"]["list"]]
    assert {"datasource", "cluster", "namespace", "llmdeployment"} <= set(defined)
    text = json.dumps([panel["targets"] for panel in panels(name)])
    used = set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__rate_interval", "__range"}
    assert used == set(defined)


@pytest.mark.parametrize("name", BOARDS)
def test_clusters_are_told_apart(name: str) -> None:
    """Where one Prometheus knows several: what is shown is of the chosen ones, and no join mixes them."""
    for panel in panels(name):
        for target in panel["targets"]:
            expression = target["expr"]
            chosen = re.sub(r'[\w:]+{cluster=~"\$cluster"[^}]*}', "", expression)
            assert not metric_names(chosen) - {"octavo:engine_alive", "octavo:engine_ready"}, (
                panel["title"],
                expression,
            )
            for labels in re.findall(r"\bon \(([^)]*)\)", expression):
                assert "cluster" in labels.split(", "), panel["title"]
            if "namespace" in (by := " ".join(re.findall(r"\bby \(([^)]*)\)", expression))):
                assert "cluster" in by, panel["title"]


def test_metric_names_are_found_in_expressions() -> None:
    text = 'sum by (le, kind) (rate(a:b_bucket{x="c", y=~"d|e"}[5m])) / on (f) (g > 0) or h{i="j"} offset 30m and k_l'
    assert metric_names(text) == {"a:b_bucket", "g", "h", "k_l"}


@pytest.mark.skipif(not binaries.are_built(), reason="Helm is one of the rig's programs: `make cluster` builds them")
def test_the_chart_brings_them_for_the_sidecar() -> None:
    def config_maps(*settings: str) -> list[dict[str, Any]]:
        flags = [flag for setting in settings for flag in ("--set", setting)]
        command = [str(binaries.programs()["helm"]), "template", "release", str(published()), "-n", "system", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "ConfigMap"]

    found = config_maps()
    assert {key: json.loads(text) for one in found for key, text in one["data"].items()} == {
        f"octavo-{name}.json": board for name, board in BOARDS.items()
    }
    for one in found:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(one)) < 1 << 20
    assert not config_maps("monitoring.dashboards.enabled=false")
    elsewhere = config_maps("monitoring.dashboards.namespace=grafana", "monitoring.dashboards.labels.mine=yes")
    assert {one["metadata"]["namespace"] for one in elsewhere} == {"grafana"}
    assert all(one["metadata"]["labels"]["mine"] == "yes" for one in elsewhere)


# With a real engine and a real Prometheus.


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Few places, few blocks, a short queue: under load it queues, preempts and refuses."""
    flags = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "16", "--max-model-len", "200"]
    flags += ["--max-num-queued-reqs", "8"]
    flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}']
    with Engine(tmp_path_factory.mktemp("engine"), *flags) as one:
        yield one


@pytest.fixture(scope="module")
def scraped(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen the engine under load for a while."""
    if prometheus.programs() is None:
        pytest.skip("no Prometheus here, and none to be had by apt-get; PROMETHEUS_BIN=FOLDER names one")
    labels = {"namespace": "models", "llmdeployment": "tiny", "pod": "tiny-0"}
    job = {"job_name": "engine", "static_configs": [{"targets": [engine.metrics_address], "labels": labels}]}
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [job], RULES) as one:
        eventually(lambda: one.up().get(engine.metrics_address))
        end = time.monotonic() + 12
        work = threading.Thread(target=load, args=(engine, end))
        work.start()
        work.join()
        yield one


def load(engine: Engine, end: float) -> None:
    number = 0
    # Greedy, a random model repeats itself, so that there is something to guess.
    engine.complete("again and " * 10, max_tokens=60, temperature=0)  # while what guesses cost is not known yet
    while time.monotonic() < end:
        number += 1
        threads = engine.crowd(6 if number % 4 else 20, max_tokens=60)
        engine.complete("what everybody asks " * 10, max_tokens=8)
        for thread in threads:
            thread.join()
        engine.complete("again and " * 10, max_tokens=60, temperature=0)  # alone, where guesses pay


@pytest.mark.slow
def test_every_query_of_the_engine_board_gives_series(scraped: Prometheus) -> None:
    empty = [
        (title, query)
        for title, query in queries("engine")
        if not dashboards.has_points(scraped.query_range(query, 20, 1))
    ]
    assert not empty


@pytest.mark.slow
def test_the_load_shows_on_the_engine_board(scraped: Prometheus) -> None:
    """That panels draw the thing itself, not only something."""
    shown = {title: scraped.query_range(query, 20, 1) for title, query in queries("engine")}

    def highest(title: str) -> float:
        return max(float(value) for one in shown[title] for _, value in one["values"] if value != "NaN")

    assert highest("Waiting") >= 1
    assert highest("KV cache, fullest") > 0.3
    assert highest("Refused") > 0
    assert 0 < highest("Prefix hit rate") <= 1
    assert 0 <= highest("Right guesses") <= 1 <= highest("Tokens per guess") <= 3
    assert highest("Engines alive") == 1


@pytest.mark.slow
def test_engines_expose_the_series_of_alerts_and_boards(engine: Engine) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "x-octavo-tenant": "red"}
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{engine.port}/v1/completions", body, headers))
    page = urllib.request.urlopen(f"http://{engine.metrics_address}/metrics", timeout=10).read().decode()
    others = ("octavo_operator_", "octavo_llmdeployment_", "octavo_llmgateway_", "octavo_router_", "envoy_")
    engines = {name for name in dashboards.names_read() if not name.startswith(others)}
    recorded = {name for name in engines if name.startswith("llmdeployment:")}
    assert len(engines) > 30
    assert engines - recorded - dashboards.exposed(page) == set()
