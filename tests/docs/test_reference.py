"""The reference pages say what the code says."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from generate import chart, environment, source  # noqa: E402
from generate.__main__ import FOLDER, PAGES  # noqa: E402
from generate.source import OPERATOR  # noqa: E402


@pytest.mark.parametrize("name", PAGES)
def test_generating_a_page_anew_changes_nothing(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


def test_the_chart_s_readme_has_the_values_of_the_chart() -> None:
    assert (chart.CHART / "README.md").read_text() == chart.readme(), "run `make reference`"


def test_every_page_is_generated() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.environ.get('A_B')",
        "import os; os.environ['A_B']",
        "import os; os.getenv('A_B')",
        "import os\nNAME = 'A_B'\nos.environ.get(NAME)",
        "import os\nfor name in ('A_B',):\n    os.environ.get(name)",
        "import os\ndef flag(name): return os.environ.get(name)\nflag('A_B')",
    ],
)
def test_a_variable_is_found_however_it_is_read(source: str) -> None:
    assert set(environment._variables(ast.parse(source))) == {"A_B"}


def test_a_variable_without_a_description_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(environment.ENGINE, "OCTAVO_CACHE")
    with pytest.raises(LookupError, match=r"does not describe.*OCTAVO_CACHE"):
        environment.page()


def test_every_value_of_the_chart_is_described() -> None:
    assert [path for path, _, text in chart.values(chart.CHART) if not text] == []


def test_every_field_and_flag_is_described() -> None:
    for name in ("llmdeployment.md", "serve.md", "commands.md", "metrics.md"):
        rows = [line for line in (FOLDER / name).read_text().splitlines() if line.startswith("| `")]
        assert len(rows) > 20
        assert [row for row in rows if row.endswith("|  |")] == []


def test_troubleshooting_knows_every_reason_of_a_condition() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    found = set(reasons())
    assert len(found) > 60
    assert [one for one in sorted(found) if not re.search(rf"\b{one}\b", page)] == []


def reasons() -> Iterator[str]:
    """Reasons in the operator's source: of a Problem, of a condition, of a verdict (status, reason, message)."""
    trees = source.trees(OPERATOR).values()
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    nodes = [call.args[0] for call in source.calls("Problem", OPERATOR) if call.args]
    nodes += [call.args[2] for call in source.calls("make_condition", OPERATOR) if len(call.args) > 2]
    nodes += [call.args[1] for call in source.calls("InvalidTemplateError", OPERATOR) if len(call.args) > 1]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple) and node.elts:
                first = source.constant(node.elts[0])
                if first == "OOMKilled":  # the reasons with which nothing is started from zero
                    nodes += node.elts
                elif len(node.elts) == 3 and isinstance(node.elts[0], ast.Constant) and first in (True, False, None):
                    nodes.append(node.elts[1])
    found = [constants.get(one.id) if isinstance(one, ast.Name) else source.constant(one) for one in nodes]
    yield from (one for one in found if isinstance(one, str))


def _constants(tree: ast.AST) -> Iterator[tuple[str, object]]:
    """Constants of a module, by name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))
