"""The chart as `make chart` packs it: whole for ArtifactHub, always the same bytes, installed from a registry.

That of the tree refuses the images that nobody can pull yet.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries
from support.chart_values import published, release_chart

ROOT = Path(__file__).parents[2]
TREE = ROOT / "charts/octavo"
DIGESTS = {name: f"sha256:{number:064x}" for number, name in enumerate(("operator", "server", "server-cpu", "router"))}
REPOSITORIES = ("image.repository", "engine.image.repository", "router.image.repository")

needs_helm = pytest.mark.skipif(not binaries.are_built(), reason="Helm is one of the rig's programs: `make cluster`")


def helm(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binaries.programs()["helm"]), *arguments], capture_output=True, text=True, env=options)


@needs_helm
def test_the_tree_refuses_its_default_images_in_a_sentence() -> None:
    done = helm("template", "release", str(TREE))
    assert done.returncode != 0
    assert "the default images of" in done.stderr and "are not published: build and push yours" in done.stderr
    assert all(name in done.stderr for name in REPOSITORIES)
    one_left = [f"--set={name}=registry.example.com/x" for name in REPOSITORIES[1:]]
    done = helm("template", "release", str(TREE), *one_left)
    assert done.returncode != 0 and "set image.repository, or" in done.stderr
    assert helm("template", "release", str(TREE), "--set=global.imageRegistry=ghcr.io").returncode != 0


@needs_helm
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([f"{name}=registry.example.com/x" for name in REPOSITORIES], id="images of mine"),
        pytest.param(
            [f"{name.replace('repository', 'digest')}={DIGESTS['server']}" for name in REPOSITORIES], id="digests"
        ),
        pytest.param(["global.imageRegistry=registry.example.com"], id="a registry of mine"),
        pytest.param(["replicas=0"], id="nobody pulls them"),
    ],
)
def test_the_tree_takes_images_that_are_there(settings: list[str]) -> None:
    done = helm("template", "release", str(TREE), *(f"--set={setting}" for setting in settings))
    assert done.returncode == 0, done.stderr


def test_published_chart_has_all_fields_that_artifacthub_shows(tmp_path: Path) -> None:
    chart = release_chart().stage(tmp_path, DIGESTS)
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    notes, version = described["annotations"], described["version"]
    assert not [name for name in notes if name.startswith("octavo.dev/")]
    assert described["maintainers"] and described["sources"] and described["home"].startswith("https://github.com/")
    readme = (chart / "README.md").read_text()
    assert "helm install octavo oci://" in readme and " charts/octavo" not in readme and "](../" not in readme
    assert (chart / "values.schema.json").exists()
    assert [one["image"].rpartition("/")[2] for one in yaml.safe_load(notes["artifacthub.io/images"])] == [
        f"octavo-{name}@{digest}" for name, digest in DIGESTS.items()
    ]
    kinds = {
        yaml.safe_load(path.read_text())["spec"]["names"]["kind"]
        for path in (chart / "files").glob("*.yaml")
        if path.name.startswith("octavo.dev_")
    }
    assert {one["kind"] for one in yaml.safe_load(notes["artifacthub.io/crds"])} == kinds
    links = re.findall(rf"https://github\.com/octavo-dev/octavo/(?:blob|raw)/v{version}/([\w./-]+)", everything(chart))
    assert len(links) > 30 and all((ROOT / path).exists() for path in links)
    assert "/octavo/blob/main/" not in everything(chart) and "https://octavo.dev" not in everything(chart)


def everything(chart: Path) -> str:
    return "\n".join(path.read_text() for path in chart.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("given", "why"),
    [("server=sha256:1", "is no digest"), (f"sever={DIGESTS['server']}", "is none of")],
)
def test_a_digest_of_nothing_is_refused(given: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        release_chart().digest_of(given)


@needs_helm
@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ((), f"ghcr.io/octavo-dev/octavo-server@{DIGESTS['server']}"),
        (
            ("engine.image.repository=ghcr.io/octavo-dev/octavo-server-cpu",),
            f"ghcr.io/octavo-dev/octavo-server-cpu@{DIGESTS['server-cpu']}",
        ),
        (("engine.image.tag=0.1",), "ghcr.io/octavo-dev/octavo-server:0.1"),
        (("engine.image.repository=mine/octavo-server",), "mine/octavo-server:VERSION"),
        (("global.imageRegistry=mirror.example.com",), "mirror.example.com/octavo-dev/octavo-server:VERSION"),
        ((f"engine.image.digest={DIGESTS['router']}",), f"ghcr.io/octavo-dev/octavo-server@{DIGESTS['router']}"),
    ],
)
def test_the_digest_that_was_published_is_that_of_the_published_image_alone(
    settings: tuple[str, ...], image: str, tmp_path: Path
) -> None:
    """Someone's own tag, copy or build has another, which only they know."""
    chart = release_chart().stage(tmp_path, DIGESTS)
    done = helm("template", "release", str(chart), *(f"--set={one}" for one in settings))
    assert done.returncode == 0, done.stderr
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    assert f'value: "{image.replace("VERSION", version)}"\n' in done.stdout


def test_the_same_commit_makes_the_same_bytes(tmp_path: Path) -> None:
    program, packed = release_chart(), []
    for name in ("one", "two"):
        chart = program.stage(tmp_path / name, DIGESTS)
        packed.append(program.pack(chart, tmp_path / f"{name}-out"))
    assert packed[0].read_bytes() == packed[1].read_bytes()
    with tarfile.open(packed[0]) as archive:
        names = archive.getnames()
    assert names[0] == "octavo/Chart.yaml" and "octavo/values.schema.json" in names
    assert {path.relative_to(TREE).as_posix() for path in TREE.rglob("*") if path.is_file()} == {
        name.removeprefix("octavo/") for name in names
    }


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry on this machine alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config = {"version": "0.1", "log": {"level": "error"}, "storage": storage, "http": {"addr": address}}
    (tmp_path / "registry.yaml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [binaries.programs()["registry"], "serve", tmp_path / "registry.yaml"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", int(address.partition(":")[2]))) == 0:
                    break
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@needs_helm
def test_it_is_installed_from_a_registry(registry: str, tmp_path: Path) -> None:
    program = release_chart()
    packed = program.pack(program.stage(tmp_path / "stage"), tmp_path)
    home = {"HOME": str(tmp_path)}
    pushed = helm("push", str(packed), f"oci://{registry}/charts", "--plain-http", **home)
    assert pushed.returncode == 0 and re.search(r"^Digest: sha256:[0-9a-f]{64}$", pushed.stderr + pushed.stdout, re.M)
    version = packed.stem.removeprefix("octavo-")
    where = [f"oci://{registry}/charts/octavo", "--version", version, "--plain-http"]
    fetched = helm("template", "release", *where, "-n", "system", **home)
    assert fetched.returncode == 0, fetched.stderr
    told, _, objects = fetched.stdout.partition("---\n")  # first where it is from
    assert told.count("\n") == 2
    assert f"---\n{objects}" == helm("template", "release", str(published()), "-n", "system", **home).stdout
    shown = helm("show", "readme", *where, **home)
    assert shown.stdout.strip().endswith((published() / "README.md").read_text().strip())
