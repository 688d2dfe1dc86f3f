"""Flags, fields and metrics that pages speak of exist, and links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from generate.__main__ import FOLDER  # noqa: E402

WRITTEN = [*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference")]
WRITTEN += [ROOT / "charts/octavo/README.md"]
PAGES = sorted(path for path in WRITTEN if path.name != "CHANGELOG.md")  # which is of the past
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# Of other programs, and one that is an example of a wrong one.
FOREIGN_FLAGS = {
    "--agreement",
    "--all",
    "--as",
    "--create-namespace",
    "--encoders",
    "--excludes",
    "--extra-index-url",
    "--files",
    "--find-links",
    "--help",
    "--index-url",
    "--max-model",
    "--merge",
    "--model-server-metrics-port",
    "--no-deps",
    "--only",
    "--page",
    "--peers",
    "--previous",
    "--quick",
    "--readme",
    "--recursive",
    "--replicas",
    "--resume",
    "--set",
    "--strict",
    "--take-ownership",
    "--target",
    "--vocabulary",
}


def names(page: str, pattern: str) -> set[str]:
    """What stands at the beginning of the rows of a reference page."""
    return set(re.findall(pattern, (FOLDER / page).read_text()))


@pages
def test_flags_exist(page: Path) -> None:
    known = names("serve.md", r"`(--[a-z0-9-]+)") | names("commands.md", r"`(--[a-z0-9-]+)") | FOREIGN_FLAGS
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", text)) - known == set()


@pages
def test_fields_of_the_spec_exist(page: Path) -> None:
    kinds = ("llmdeployment.md", "llmgateway.md")
    known = {one for kind in kinds for one in names(kind, r"\| `((?:spec|status)[\w.\[\]]*)` \|")}
    maps = {one for kind in kinds for one in names(kind, r"\| `(spec[\w.]*)` \| map of")}
    said = set(re.findall(r"`((?:spec|status)(?:\.[A-Za-z]+)+)", page.read_text()))
    said = {one for one in said if one.rpartition(".")[0] not in maps}
    assert said - {one.replace("[]", "") for one in known} == set()


@pages
def test_metrics_exist(page: Path) -> None:
    known = names("metrics.md", r"\| `([\w:]+)` \|")
    said = set(
        re.findall(r"((?:vllm|octavo):[a-z_]+|octavo_(?:operator|llmdeployment|llmgateway)_[a-z_]+)", page.read_text())
    )
    said = {re.sub(r"_(total|bucket|sum|count)$", "", one) for one in said if not one.endswith("_")}
    assert said - known - {re.sub(r"_total$", "", one) for one in known} - {"octavo_operator"} == set()


@pages
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[#)]", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_page_that_is_shown_where_there_is_none_leads_to_pages() -> None:
    theme = ROOT / "docs/theme"
    assert f"custom_dir: {theme.relative_to(ROOT)}\n" in (ROOT / "mkdocs.yml").read_text()
    led = re.findall(r"\{\{ '([^']+)\.html' \| url \}\}", text := (theme / "404.html").read_text())
    assert len(led) == text.count("href=") > 3
    assert [name for name in led if not (ROOT / f"docs/{name}.md").exists()] == []


@pages
def test_paths_exist(page: Path) -> None:
    said = re.findall(
        r"`((?:server|kernels|operator|tests|benchmarks|charts|docs|examples|crds)/[\w./-]+)`", page.read_text()
    )
    assert [path for path in said if not (ROOT / path).exists()] == []
