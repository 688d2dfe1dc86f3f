"""Every code block of the pages that can run is run, and every other one is checked as far as it goes.

`bash` and `python` blocks run in their order on the page, against one server on the embedded model, in the environment
that the README makes: the wheel and what serving needs, an ordinary user, no compiler. `sh` blocks hold commands that
cannot run here; `NOT_RUN` says why, and what can be checked of them is: make's targets, the flags of `octavo serve`,
values of the chart, files. LLMDeployments and LLMGateways are checked against their CRDs.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml
from support.wheels import Environment, readme_environment

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from generate import chart, crd, walkthrough  # noqa: E402
from generate.blocks import Block, blocks_of  # noqa: E402
from generate.commands import parser  # noqa: E402

from octavo.cli.image import command_line  # noqa: E402
from octavo.fetch.cache import cache_dir  # noqa: E402
from octavo.fetch.model_names import DEFAULT_MODEL  # noqa: E402
from octavo.fetch.sources import resolve_model  # noqa: E402
from octavo.version import __version__  # noqa: E402
from octavo_kernels.cpu import compiler  # noqa: E402

WRITTEN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "charts/octavo/README.md"]
PAGES = sorted(path for path in WRITTEN if path.parent.name != "reference")
URL = "http://127.0.0.1:8000"

# The beginning of a command -> why it does not run here.
NOT_RUN = {
    "make serve": "serves until it is stopped",
    "make demo": "needs root",
    "make image": "needs root",
    "make": "makes everything anew",
    "helm": "needs a cluster",
    "kubectl": "needs a cluster",
    "curl http://models.default.svc": "needs a cluster",
    "curl --json": "needs a model for code",
    "octavo serve": "serves until it is stopped",
    "octavo dashboard": "serves until it is stopped",
    "pip install": "changes the environment",
    "docker run": "needs Docker",
    "cosign": "asks a registry and a log of signatures",
    "gh": "asks the forge",
    "git": "needs a change",
    "export": "sets what the commands below it use",
}
LANGUAGES = {"sh", "bash", "python", "yaml", "text", ""}


BLOCKS = [one for page in PAGES for one in blocks_of(page)]


def of(*languages: str) -> Any:
    """Blocks of these languages, the walk-through's own left out; of equal ones on several pages the first."""
    alone = {id(one) for one in BLOCKS if one.page == walkthrough.PAGE and one.language in ("bash", "python")}
    found = {one.text: one for one in reversed(BLOCKS) if one.language in languages and id(one) not in alone}
    return pytest.mark.parametrize("block", list(found.values())[::-1], ids=str)


def commands(block: Block) -> Iterator[list[list[str]]]:
    """The commands of a block, each as the pipe that it begins: lines, continued ones joined, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for chain in _split(words, {"&&", ";"}):
            yield list(_split(chain, {"|"}))


def _split(words: list[str], at: set[str]) -> Iterator[list[str]]:
    for is_end, part in itertools.groupby(words, lambda word: word in at):
        if not is_end:
            yield list(part)


def test_every_block_has_a_language_that_is_checked() -> None:
    assert len(BLOCKS) > 60
    assert [str(one) for one in BLOCKS if one.language not in LANGUAGES] == []
    plain = [one for one in BLOCKS if one.language == ""]  # a drawing, and how others were started in a comparison
    assert [str(one) for one in plain if "──▶" not in one.text and "octavo serve " not in one.text] == []


@of("sh")
def test_a_command_that_does_not_run_here_says_why_and_exists(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    values = {path for path, _, _ in chart.values(chart.CHART)}
    for words, *piped in commands(block):
        for more in piped:
            if more[:2] == ["octavo", "chat"]:
                parser("chat").parse_args(more[2:])
        assert any(" ".join(words).startswith(known) for known in {**NOT_RUN, "octavo run": "is run below"}), (
            f"{words}: run it (bash), or say why not"
        )
        if words[0] == "make":
            assert words[1] in targets
            for setting in words[2:]:
                if words[1] == "serve" and setting.startswith("ARGS="):
                    parser("serve").parse_args(setting.removeprefix("ARGS=").split())
        elif words[:2] in (["octavo", "serve"], ["octavo", "dashboard"]):
            parser(words[1]).parse_args(words[2:])
        elif words[0] == "docker":
            (image,) = (word for word in words if word.startswith("octavo-server"))
            command, *arguments = command_line(words[words.index(image) + 1 :])
            parser(command).parse_args(arguments)
        elif words[0] == "helm":
            for flag, setting in itertools.pairwise(words):
                assert flag != "--set" or setting.partition("=")[0] in values, setting
        for file in (word for flag, word in itertools.pairwise(words) if flag == "-f"):
            assert (ROOT / file).exists(), file


def test_no_reason_is_left_over() -> None:
    used = [" ".join(words) for one in BLOCKS if one.language == "sh" for words, *_ in commands(one)]
    assert [known for known in NOT_RUN if not any(command.startswith(known) for command in used)] == []


def strict(schema: Any) -> Any:
    """The CRD's schema with unknown fields refused: the API server would drop them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if "properties" in out and not out.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """By kind."""
    made = {}
    for manifest in map(crd.definition, ("llmdeployments", "llmgateways")):
        found = strict(manifest["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        found["properties"]["metadata"] = {"type": "object"}
        made[manifest["spec"]["names"]["kind"]] = found
    return made


@of("yaml")
def test_yaml_is_what_it_says(block: Block, schemas: dict[str, Any]) -> None:
    (value,) = yaml.safe_load_all(block.text)
    if set(value) == {"spec"} and block.page.name == "gateways.md":
        value = {"kind": "LLMGateway", "metadata": {}, **value}
    elif set(value) == {"spec"}:  # a part of an LLMDeployment
        model = {"uri": "smollm2-135m-instruct"}
        value = {"kind": "LLMDeployment", "metadata": {}, "spec": {"model": model, **value["spec"]}}
    if value.get("kind") in schemas:
        jsonschema_rs.validate(schemas[value["kind"]], value)
    elif set(value) <= set(yaml.safe_load((chart.CHART / "values.yaml").read_text())):
        jsonschema_rs.validate(json.loads((chart.CHART / "values.schema.json").read_text()), value)
    elif "max-model-len" in value:  # a file for --config
        known = set(parser("serve").parse_args.__self__.flags())
        assert {f"--{name}" for name in value} <= known
    else:
        assert {"scrape_configs", "apiVersion"} & set(value)  # Prometheus' is run by tests/e2e/test_alerts.py


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_of_our_kinds(path: Path, schemas: dict[str, Any]) -> None:
    for value in yaml.safe_load_all(path.read_text()):
        jsonschema_rs.validate(schemas[value["kind"]], value)


THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
ALSO = [version for version in ("3.11", "3.13") if version != THIS]  # the oldest and the newest that releases are for


def interpreter(version: str) -> str:
    """A Python of that version on this machine."""
    inside = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for found in filter(None, [shutil.which(f"python{version}"), *map(str, inside)]):
        if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:  # not a shim of none
            return found
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(scope="module", params=[THIS, *(pytest.param(version, marks=pytest.mark.long) for version in ALSO)])
def readme(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """What `make serve`, or pip with the wheel, leaves; beside it the clients that people have of their own."""
    python = sys.executable if request.param == THIS else interpreter(request.param)
    resolve_model(DEFAULT_MODEL)
    with readme_environment(python, models=cache_dir() / "pypi") as made:
        yield made.add("openai", "anthropic", "ollama")


@pytest.fixture(scope="module")
def url(readme: Environment) -> Iterator[str]:
    with readme.serving() as address:
        yield address


def pasted(block: Block, url: str) -> str:
    """A block of `bash` as it runs here: against this server, where an error of HTTP is one of the command."""
    script = "set -euo pipefail\n" + block.text.replace(URL, url).replace("curl ", "curl -sS --fail-with-body ")
    script = script.replace("octavo bench sweep ", "octavo bench sweep --repeats 1 ")
    return script.replace("bench serve", f"bench serve --base-url {url}")


@pytest.mark.slow
@pytest.mark.model
@of("bash")
def test_commands_run(block: Block, url: str, readme: Environment) -> None:
    status, out, err = readme.run("bash", "-c", pasted(block, url), where=readme.empty_folder())
    assert status == 0, out + err
    assert out.strip()
    assert "Traceback" not in err and "slower" not in err, err


@pytest.mark.slow
@pytest.mark.model
def test_a_first_run_answers_by_the_kernels_of_the_wheel(readme: Environment) -> None:
    """As install.md has it: without a model, and without a question it ends with the input."""
    assert readme.run("octavo", "run")[:2] == (0, "")
    status, out, err = readme.run("octavo", "run", DEFAULT_MODEL, "Name the capital of France.", timeout=60)
    assert status == 0 and "Paris" in out, out + err
    assert "slower" not in err, "torch computes in place of the kernels"
    installed = {path.name for path in readme.folder.glob("environment/lib/*/site-packages/octavo_kernels/cpu/lib/*")}
    assert compiler.library_name(compiler.supported_isas()[0]) in installed


@pytest.mark.slow
@pytest.mark.model
@of("python")
def test_python_runs(block: Block, url: str, readme: Environment) -> None:
    status, out, err = readme.run("python", "-c", block.text.replace(URL, url))
    assert status == 0, err
    assert out.strip()
    if "capital of France" in block.text:
        assert "Paris" in out
    if "json_schema" in block.text:
        assert set(json.loads(out)) == {"city", "country"}


# Steps of the walk-through that need no other ones, and what they say.
PARTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "offline": ((0, 1, 2, 3), ("KV cache", "Paris", "Hugging Face, bfloat16", "times Hugging Face")),
    "measured": ((4, 7, 8), ("TTFT p50", "KV cache")),
    "served": ((5, 6, 9, 10), ("Paris", "first chunk after", "dashboard at")),
}


def test_every_step_of_the_walk_through_has_a_part() -> None:
    numbers = [number for steps, _ in PARTS.values() for number in steps]
    assert sorted(numbers) == [*range(len(walkthrough.steps()))]


def test_the_walk_through_shows_the_versions_that_make_setup_installs() -> None:
    shown, pins = walkthrough.PAGE.read_text(), (ROOT / "requirements/dev.txt").read_text()
    for name in ("torch", "transformers"):
        assert f"\n{name} {re.findall(rf'^{name}==([0-9.]+)', pins, re.MULTILINE)[0]}" in shown
    assert f"\noctavo {__version__}\n" in shown


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("part", PARTS)
def test_the_walk_through_runs_as_it_is_pasted(part: str) -> None:
    ports, steps = walkthrough.free_ports(), walkthrough.steps()
    numbers, words = PARTS[part]
    with walkthrough.laboratory() as folder:
        outputs = [walkthrough.run(steps[one], folder, {**walkthrough.SMALL, **ports}) for one in numbers]
    everything = "".join(outputs)
    for word in words:
        assert word in everything


@pytest.mark.slow
@pytest.mark.model
def test_every_metric_that_a_server_exposes_is_on_the_page(url: str) -> None:
    exposed = set(re.findall(r"^# TYPE (\S+) ", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    page = (ROOT / "docs/reference/metrics.md").read_text()
    missing = [name for name in exposed if f"`{name.removesuffix('_total')}`" not in page and f"`{name}`" not in page]
    assert [name for name in missing if "process_" not in name] == []
    assert len(exposed) > 40


@pytest.mark.slow
@pytest.mark.model
def test_every_route_of_a_server_is_on_the_page(url: str) -> None:
    page = (ROOT / "docs/reference/routes.md").read_text()
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert len(paths) > 10
    assert [path for path in paths if f"`{path}`" not in page] == []
