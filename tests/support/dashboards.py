"""The chart's dashboards as a test reads them: panels, and their queries as Grafana would send them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "charts/octavo/files/dashboards"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}

_WORDS = frozenset(
    (
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "and",
        "or",
        "unless",
        "bool",
        "offset",
        "inf",
        "nan",
    )
)


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Those with queries."""
    return (panel for panel in BOARDS[name]["panels"] if panel["type"] != "row")


def queries(name: str) -> Iterator[tuple[str, str]]:
    """Title of the panel and expression, with every variable at All."""
    for panel in panels(name):
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "30s").replace("$__range", "5m")
            yield panel["title"], re.sub(r"\$\{?\w+\}?", ".*", text)


def metric_names(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    text = re.sub(r'"[^"]*"' + "|'[^']*'", "", expression)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    found = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\(|[a-zA-Z0-9_:])", re.sub(r"\b\d[\w.]*", " ", text)))
    return {name for name in found if name.lower() not in _WORDS}


def names_read() -> set[str]:
    """The metrics that any alert or dashboard reads."""
    groups = yaml.safe_load((FOLDER.parent / "alerts.yaml").read_text())["groups"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    expressions += [query for name in BOARDS for _, query in queries(name)]
    return {name for one in expressions for name in metric_names(one)}


def exposed(page: str) -> set[str]:
    """The names of a /metrics page."""
    lines = (line for line in page.splitlines() if line and not line.startswith("#"))
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines}


def has_points(series: list[dict[str, Any]]) -> bool:
    """Whether some series of a range query has a number to draw."""
    return any(not math.isnan(float(value)) for one in series for _, value in one["values"])
