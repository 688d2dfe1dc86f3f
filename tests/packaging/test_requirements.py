"""What is installed for whom: `make serve` brings what serving needs, and no GPU's libraries where there is no GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.system.torch_import import _may_have_gpu

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
FOR_A_GPU = re.compile(r"nvidia-.*|cuda-.*|triton")


def pins(name: str) -> list[str]:
    """The packages of a list. That they are pinned as the tests have them, tests/e2e/test_image_files.py sees."""
    return re.findall(r"^([a-z0-9._-]+)==", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)


def test_serving_takes_what_the_server_needs_without_what_a_gpu_needs() -> None:
    server, serve = set(pins("server")), set(pins("serve"))
    assert "torch" in serve and len(serve) > 40
    assert [name for name in serve if FOR_A_GPU.fullmatch(name)] == ["nvidia-cuda-runtime"]
    assert {name for name in server if not FOR_A_GPU.fullmatch(name)} == serve - {"nvidia-cuda-runtime"}


def unpacked_bytes(package: str) -> int:
    """Size of an installed package; more than that of its wheel."""
    files = importlib.metadata.distribution(package).files or []
    return sum(file.size or 0 for file in files)


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are those for Linux")
def test_serving_s_requirements_are_small() -> None:
    """To download it is half of that: 0.6 GB, where tests and a GPU's libraries make it 2.7."""
    here = {one.name.lower().replace("_", "-") for one in importlib.metadata.distributions()}
    serve = sum(unpacked_bytes(name) for name in set(pins("serve")) & here)
    assert 0.2e9 < serve < 1.4e9


def run_make(target: str, folder: Path, *settings: str) -> str:
    if not (folder / "Makefile").exists():
        for part in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / part, folder)
        shutil.copytree(REQUIREMENTS, folder / "requirements")
    done = subprocess.run(["make", "-n", target, *settings], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_serve_installs_no_tests_and_setup_installs_all(tmp_path: Path) -> None:
    serve = run_make("serve", tmp_path)
    assert "--no-deps -r requirements/serve.txt" in serve, "torch's own list names NVIDIA's packages"
    assert "requirements/dev.txt" not in serve and "octavo serve" in serve
    assert "-r requirements/dev.txt" in run_make("test", tmp_path)
    # After `make setup` serving has all it needs.
    made = tmp_path / ".venv/bin"
    made.mkdir(parents=True)
    for stamp in (made / "uv", made.parent / ".installed", made.parent / ".serve"):
        stamp.touch()
    assert "pip install" not in run_make("serve", tmp_path)
    assert "pip install" not in run_make("setup", tmp_path)


def link_to(source: Path, place: Path) -> None:
    if source.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)


@pytest.fixture(scope="module")
def as_served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that finds the packages of serve.txt alone, as `make serve` installs them."""
    if not sys.platform.startswith("linux") or _may_have_gpu():
        pytest.skip("needs Linux without a GPU")
    folder = tmp_path_factory.mktemp("packages")
    for package in set(pins("serve")):
        try:
            files = importlib.metadata.distribution(package).files or []
        except importlib.metadata.PackageNotFoundError:  # for another system or Python
            continue
        for name in {file.parts[0] for file in files} - {"..", "torch", "nvidia", "__pycache__"}:
            link_to(Path(importlib.metadata.distribution(package).locate_file(name)), folder / name)
        # Torch looks for NVIDIA's libraries beside its own: there it must not find those of the place that it is from.
        for file in files:
            where = Path(file.locate())
            if (package == "nvidia-cuda-runtime" and ".so" in file.name) or file.parts[:2] == ("torch", "lib"):
                link_to(where, folder / file)
            elif file.parts[0] == "torch":
                link_to(
                    where.parents[len(file.parts) - 3] if len(file.parts) > 2 else where, folder / Path(*file.parts[:2])
                )
    path = os.pathsep.join([str(folder), str(ROOT / "server"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path}


def run_as_served(env: dict[str, str], code: str) -> str:
    python = sys._base_executable  # type: ignore[attr-defined]  # not the environment's, which has everything
    done = subprocess.run([python, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.model
def test_the_packages_for_serving_suffice(as_served: dict[str, str]) -> None:
    """Offline, where torch comes whole; the imports of the API process; and torch as the engine's process has it."""
    out = run_as_served(
        as_served,
        """
import importlib.util
missing = [name for name in ("pytest", "triton", "transformers") if importlib.util.find_spec(name)]
assert not missing, missing
import octavo.cli.serve, octavo.entrypoints.server
from octavo import LLM, SamplingParams
question = [{"role": "user", "content": "Name the capital of France."}]
print(LLM(max_model_len=256).chat(question, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
import torch, torch.export
assert torch.export.Dim and not torch.cuda.is_available()
""",
    )
    assert "Paris" in out
    code = (
        "from octavo.system.torch_import import import_torch; import_torch()\n"
        "import octavo.worker.worker; print('there')"
    )
    assert run_as_served(as_served, code) == "there\n"


def test_a_gpu_without_its_libraries_is_told_the_way_out(as_served: dict[str, str]) -> None:
    out = run_as_served(
        as_served,
        """
from octavo import errors
from octavo.system import torch_import
torch_import._may_have_gpu = lambda: True
for importing in (torch_import.import_torch, torch_import.import_whole_torch):
    try:
        importing()
    except errors.ConfigError as error:
        print(error)
""",
    )
    assert len(out.splitlines()) == 2
    assert all("NVIDIA" in line and "`make setup`" in line for line in out.splitlines())


def test_the_readme_begins_with_what_anybody_can_run() -> None:
    """Neither root nor a cluster."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks[0] == "make serve\n"
