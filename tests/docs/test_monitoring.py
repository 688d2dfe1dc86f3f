"""The scrape jobs of the page, for who has no Prometheus operator, find what pods of every kind have to say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.llmd import parsed

from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.render import render
from octavo_operator.render.gateway import render_gateway

Json = dict[str, Any]
PAGE = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
JOBS = yaml.safe_load(next(one for one in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "scrape_configs" in one))
CONFIG = OperatorConfig()


def targets(template: Json) -> list[tuple[str, str, Json]]:
    """Job, path and labels of each port of a pod that a job scrapes, as Prometheus' relabeling makes them."""
    found = []
    labels = {
        "__meta_kubernetes_pod_label_" + re.sub(r"[^A-Za-z0-9_]", "_", name): value
        for name, value in template["metadata"]["labels"].items()
    } | {"__meta_kubernetes_namespace": "n", "__meta_kubernetes_pod_name": "p"}
    for port in (port["name"] for one in template["spec"]["containers"] for port in one.get("ports", [])):
        for job in JOBS["scrape_configs"]:
            here = {**labels, "__meta_kubernetes_pod_container_port_name": port}
            kept = True
            for rule in job["relabel_configs"]:
                value = ";".join(here.get(name, "") for name in rule["source_labels"])
                if rule.get("action") == "keep":
                    kept &= re.fullmatch(rule["regex"], value) is not None
                elif value:
                    here[rule["target_label"]] = value
            if kept:
                shown = {name: value for name, value in here.items() if not name.startswith("__")}
                found.append((port, job.get("metrics_path", "/metrics"), shown))
    return found


def template(manifests: list[Json], name: str) -> Json:
    (found,) = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("Deployment", name)]
    return dict(found["spec"]["template"])


WHERE = {"namespace": "n", "pod": "p"}


def test_both_containers_of_a_gateways_routers_are_scraped_under_its_name() -> None:
    gateway = LLMGateway.from_json({"metadata": {"name": "all", "namespace": "n", "uid": "u"}, "spec": {}})
    found = targets(template(render_gateway(gateway, [], CONFIG), "all-router"))
    told = {"llmgateway": "all", **WHERE}
    assert found == [("metrics", "/stats/prometheus", told), ("management", "/metrics", told)]


@pytest.mark.parametrize("name", ["toy", "toy-router"])
def test_pods_of_an_llmdeployment_are_scraped_under_its_name(name: str) -> None:
    found = targets(template(render(parsed(routing={"strategy": "prefix"}), CONFIG), name))
    told = {"llmdeployment": "toy", **WHERE}
    path = [("management", "/metrics", told)]
    assert found == (path if name == "toy" else [("metrics", "/stats/prometheus", told), *path])
