"""Alerts: each fires for its cause and for nothing else, ends with it, and leads to a page that helps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries, prometheus
from support.chart_values import published

from octavo_operator.api.common import GATEWAY_LABEL

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/octavo"
RULES = CHART / "files/alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOKS = ROOT / "docs/runbooks"
REPOSITORY = "https://github.com/octavo-dev/octavo"


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def rules_with_expressions() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def promtool() -> Path:
    if (found := prometheus.programs()) is None:
        pytest.skip("no Prometheus here, and none to be had by apt-get; PROMETHEUS_BIN=FOLDER names one")
    return found["promtool"]


def test_the_rules_are_clean(promtool: Path) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_and_resolves(promtool: Path) -> None:
    done = subprocess.run([promtool, "test", "rules", CASES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_clusters_in_one_prometheus_are_told_apart(promtool: Path, tmp_path: Path) -> None:
    """Every case in two clusters at once: each alert fires in each."""
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = [str(RULES)]
    for case in cases["tests"]:
        case["input_series"] = [
            {**one, "series": one["series"].replace("{", f'{{cluster="{cluster}", ')}
            for one in case["input_series"]
            for cluster in ("east", "west")
        ]
        for look in case["promql_expr_test"]:
            (selector,) = re.findall(r"ALERTS{[^}]*}", look["expr"])
            look["expr"] = f"count by (cluster) ({selector})"
            if samples := look.get("exp_samples"):
                count = sum(one["value"] for one in samples)
                look["exp_samples"] = [
                    {"labels": f'{{cluster="{cluster}"}}', "value": count} for cluster in ("east", "west")
                ]
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", rules_with_expressions(), ids=lambda rule: rule.get("alert", rule.get("record")))
def test_no_rule_mixes_clusters(rule: dict[str, Any]) -> None:
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
        assert "cluster" in re.split(r",\s*", labels), labels
    assert not re.search(r"\b(sum|max|min|avg|count|group)\s*\(", rule["expr"]), "an aggregation without labels"


def test_every_alert_is_seen_quiet_firing_and_quiet_again() -> None:
    """That the cases above leave none out."""
    seen: dict[str, list[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for look in case["promql_expr_test"]:
            (name,) = re.findall(r'alertname="(\w+)"', look["expr"])
            seen.setdefault(name, []).append("exp_samples" in look)
    assert set(seen) == set(alerts())
    for name, states in seen.items():
        assert states[0] is False and states[-1] is False and True in states, name


@pytest.mark.parametrize("name", alerts())
def test_every_alert_says_what_it_means_and_leads_to_a_page(name: str) -> None:
    alert = alerts()[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "description", "runbook_url"} == set(alert["annotations"])
    assert alert["annotations"]["runbook_url"] == f"{REPOSITORY}/blob/main/docs/runbooks/{name}.md"
    page = (RUNBOOKS / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n") and "\n## Look\n" in page and "\n## Do\n" in page
    assert f"[{name}]({name}.md) | {alert['labels']['severity']} |" in (RUNBOOKS / "README.md").read_text()


def test_pages_link_to_pages_that_are_there() -> None:
    for page in RUNBOOKS.glob("*.md"):
        for target in re.findall(r"\]\(([\w/.-]+\.md)[#\w-]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
    assert {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"} == set(alerts())


needs_helm = pytest.mark.skipif(not binaries.are_built(), reason="Helm is one of the rig's programs: `make cluster`")


def rendered(*settings: str, operator_api: bool = True) -> list[dict[str, Any]]:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    flags += ["--api-versions", "monitoring.coreos.com/v1"] if operator_api else []
    command = [str(binaries.programs()["helm"]), "template", "release", str(published()), "-n", "system", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@needs_helm
def test_the_chart_brings_the_same_rules() -> None:
    (rule,) = of_kind(rendered(), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((published() / "files/alerts.yaml").read_text())
    assert not of_kind(rendered("monitoring.rules.enabled=false"), "PrometheusRule")
    assert not of_kind(rendered(operator_api=False), "PrometheusRule")


@needs_helm
def test_alerts_can_be_labelled_and_led_to_other_pages() -> None:
    (rule,) = of_kind(
        rendered("monitoring.rules.alertLabels.team=llm", "monitoring.rules.runbookBaseUrl=https://wiki/x/"),
        "PrometheusRule",
    )
    for one in (one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one):
        assert one["labels"]["team"] == "llm" and one["labels"]["severity"]
        assert one["annotations"]["runbook_url"] == f"https://wiki/x/{one['alert']}"


@needs_helm
def test_the_operator_is_scraped_at_the_port_that_it_has() -> None:
    objects = rendered()
    monitor, gateways = of_kind(objects, "PodMonitor")
    (operator,) = of_kind(objects, "Deployment")
    labels = operator["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [p["name"] for p in operator["spec"]["template"]["spec"]["containers"][0]["ports"]]
    assert endpoint["honorLabels"] is True
    ports = {one["port"]: one["path"] for one in gateways["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics": "/stats/prometheus", "management": "/metrics"}
    assert gateways["spec"]["selector"]["matchExpressions"][0]["key"] == GATEWAY_LABEL
    assert gateways["spec"]["namespaceSelector"] == {"any": True}
    _, gateways = of_kind(rendered("watchNamespaces={a,b}"), "PodMonitor")
    assert gateways["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
