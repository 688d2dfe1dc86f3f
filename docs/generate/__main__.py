"""Write docs/reference/*.md and the table of values in the chart's README."""

from __future__ import annotations

from pathlib import Path

from generate import chart, commands, crd, environment, errors, metrics, migration, routes

FOLDER = Path(__file__).parents[1] / "reference"
PAGES = {
    "migration.md": migration.page,
    "serve.md": commands.serve_page,
    "commands.md": commands.other_pages,
    "environment.md": environment.page,
    "llmdeployment.md": crd.page,
    "llmgateway.md": crd.gateway_page,
    "chart.md": chart.page,
    "metrics.md": metrics.page,
    "routes.md": routes.page,
    "errors.md": errors.page,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    (chart.CHART / "README.md").write_text(chart.readme())


if __name__ == "__main__":
    main()
