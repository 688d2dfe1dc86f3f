"""`make chart`: the Helm chart as it is published, a file for `helm push`.

The chart in the tree refuses its default images, which nobody can pull before there is a release. The published one
does not. Its links lead to the pages of its version. Its annotations tell ArtifactHub, and the templates, which images
were published with it and by which digests (``--digest`` gives them). The same commit makes the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts/octavo"
IMAGES = ("operator", "server", "server-cpu", "router")
REGISTRY = "ghcr.io/octavo-dev"
UNPUBLISHED = "octavo.dev/unpublished"
OF_MAIN = re.compile(r"(https://(?:github|raw\.githubusercontent)\.com/octavo-dev/octavo/(?:blob/|raw/|))main/")
INSTALL = """```sh
helm install octavo oci://ghcr.io/octavo-dev/charts/octavo -n octavo-system --create-namespace
helm test octavo -n octavo-system
```
"""
TEXTS = (".yaml", ".md", ".txt", ".tpl", ".json")


def stage(folder: Path, digests: dict[str, str] | None = None) -> Path:
    """The chart as it is published, as a folder `octavo` in ``folder``; ``digests`` are those of its images by name."""
    chart = folder / "octavo"
    shutil.copytree(CHART, chart)
    described: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    version = str(described["version"])
    annotations = described["annotations"]
    del annotations[UNPUBLISHED]
    annotations["artifacthub.io/images"] = yaml.safe_dump(images(version, digests or {}), sort_keys=False)
    (chart / "Chart.yaml").write_text(yaml.safe_dump(described, sort_keys=False, width=120))
    readme = chart / "README.md"
    readme.write_text(published_readme(readme.read_text()))
    for path in chart.rglob("*"):
        if path.is_file() and path.suffix in TEXTS:
            path.write_text(OF_MAIN.sub(rf"\g<1>v{version}/", path.read_text()))
    return chart


def published_readme(text: str) -> str:
    """README.md with the published chart in its commands, and links that lead somewhere from another page too."""
    text, count = re.subn(r"Build the three images .*?```sh\n.*?```\n", INSTALL, text, count=1, flags=re.DOTALL)
    if count != 1:
        raise ValueError("README.md does not say how the images of a clone are built")
    text = text.replace(" charts/octavo ", " oci://ghcr.io/octavo-dev/charts/octavo ")
    return re.sub(r"\]\(\.\./\.\./", "](https://github.com/octavo-dev/octavo/blob/main/", text)


def images(version: str, digests: dict[str, str]) -> list[dict[str, Any]]:
    """The images that are published with the chart, as ArtifactHub has them, by digest where it is known."""
    return [
        {
            "name": f"octavo-{name}",
            "image": f"{REGISTRY}/octavo-{name}" + (f"@{digests[name]}" if name in digests else f":{version}"),
            "platforms": ["linux/amd64", "linux/arm64"],
        }
        for name in IMAGES
    ]


def pack(chart: Path, out: Path) -> Path:
    """The archive of a staged chart in the folder ``out``: without times and owners, so always the same."""
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    ignored = set((chart / ".helmignore").read_text().split())
    files = [path for path in chart.rglob("*") if path.is_file() and not any(map(path.match, ignored))]
    files.sort(key=lambda path: (path.name != "Chart.yaml", path.as_posix()))  # it is read first
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            member = tarfile.TarInfo(f"{described['name']}/{path.relative_to(chart).as_posix()}")
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    out.mkdir(parents=True, exist_ok=True)
    packed = out / f"{described['name']}-{described['version']}.tgz"
    packed.write_bytes(gzip.compress(archive.getvalue(), mtime=0))
    return packed


def digest_of(text: str) -> tuple[str, str]:
    """`server=sha256:...` as name and digest. Raises ArgumentTypeError."""
    name, _, digest = text.partition("=")
    if name not in IMAGES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(IMAGES)}")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise argparse.ArgumentTypeError(f"{name}: {digest!r} is no digest")
    return name, digest


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default dist)")
    parser.add_argument("--digest", type=digest_of, action="append", default=[], metavar="IMAGE=sha256:...")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(pack(stage(Path(scratch), dict(arguments.digest)), arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
