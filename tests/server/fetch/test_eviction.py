"""A cache of bounded size keeps what is used and what was used last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.web_server import Web

from octavo.cli.main import main
from octavo.fetch.cache import use_mark
from octavo.fetch.installed import installed

SIZE = 100_000
DAY = 86400.0


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in [n for n in os.environ if "proxy" in n.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with Web({f"/{name}.gguf": name.encode() * SIZE for name in "abcd"}) as server:
        yield server


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are no GGUF: what would be read of them is of no interest here."""
    monkeypatch.setattr("octavo.fetch.sources.derived_directory", lambda path, **_: path.parent)


def fetch(web: Web, name: str, size: int = 250_000) -> int:
    return main(["fetch", f"{web.url}/{name}.gguf", "--quiet", "--max-cache-size", str(size)])


def names() -> set[str]:
    return {model.path.stem for model in installed()}


def path_of(name: str) -> Path:
    return next(model.path for model in installed() if model.path.stem == name)


def used(name: str, ago: float) -> None:
    """It was used so many seconds ago."""
    for path in (path_of(name), use_mark(path_of(name))):
        os.utime(path, (time.time() - ago,) * 2)


def test_the_model_that_was_used_longest_ago_goes(web: Web, derived: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert (fetch(web, "a"), fetch(web, "b")) == (0, 0) and names() == {"a", "b"}
    used("a", 3 * DAY), used("b", 4 * DAY)
    assert fetch(web, "a") == 0 and names() == {"a", "b"}, "it fits"
    used("a", DAY)
    fetch(web, "c")
    assert names() == {"a", "c"} and "removed b.gguf from the cache, last used 4.0 days ago" in capsys.readouterr().err
    assert web.sent("/a.gguf") == SIZE, "what is there is not fetched again"


def test_nothing_is_evicted_without_a_size(web: Web, derived: None) -> None:
    for name in "abcd":
        assert main(["fetch", f"{web.url}/{name}.gguf", "--quiet"]) == 0
        used_by_fetch = path_of(name)
        os.utime(used_by_fetch, (0, 0))
    assert names() == set("abcd")


def test_a_fetched_model_stays_until_its_server_runs(
    web: Web, derived: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(web, "a", SIZE)
    assert fetch(web, "b", SIZE) == 0
    assert names() == {"a", "b"} and "all of it is in use" in capsys.readouterr().err


def test_a_served_model_stays(web: Web, derived: None) -> None:
    fetch(web, "a"), fetch(web, "b")
    used("a", 9 * DAY), used("b", DAY)
    code = f"from octavo.fetch.cache import *; mark_as_served(({str(path_of('a'))!r},)); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline()
        used("a", 9 * DAY)
        fetch(web, "c")
        assert names() == {"a", "c"}
        server.kill()


def test_parts_that_nobody_goes_on_with_are_removed(web: Web, derived: None, tmp_path: Path) -> None:
    fetch(web, "a")
    parts = [tmp_path / "cache/web/x-1/.x.gguf.abc.part", tmp_path / "hub/hub/models--o--n/blobs/abc.incomplete"]
    for ago, gone in ((DAY / 2, False), (2 * DAY, True)):
        for part in parts:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"x")
            os.utime(part, (time.time() - ago,) * 2)
        fetch(web, "a")
        assert [part.exists() for part in parts] == [not gone, not gone]


def test_a_model_that_another_process_has_removed_is_fetched_again(
    web: Web, derived: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look into the cache and the note that it is used."""
    from octavo.fetch import eviction

    fetch(web, "a")
    first, original = [path_of("a")], eviction.keep_and_evict

    def removed(*arguments: object) -> bool:
        while first:
            first.pop().unlink()
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(eviction, "keep_and_evict", removed)
    assert fetch(web, "a") == 0 and path_of("a").read_bytes() == b"a" * SIZE


def test_fetches_that_run_at_once_keep_their_models(web: Web, tmp_path: Path) -> None:
    """Four processes with room for two: each finds its own model there when it has ended."""
    code = (
        "import sys; from octavo.fetch import sources; from pathlib import Path\n"
        "sources.derived_directory = lambda path, **_: path.parent\n"
        "from octavo.cli.main import main\n"
        "code = main(sys.argv[1:]); sys.exit(code)"
    )
    flags = ["--quiet", "--max-cache-size", str(2 * SIZE)]
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", code, "fetch", f"{web.url}/{name}.gguf", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in "abcd"
    }
    for name, process in running.items():
        path = Path(process.communicate(timeout=60)[0].strip())
        assert process.returncode == 0 and path.read_bytes() == name.encode() * SIZE
