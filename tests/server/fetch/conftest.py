"""Fixtures of the tests that fetch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import FILES, Hub, Repo


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub({"org/model": Repo(dict(FILES))}) as server:
        for name in [
            n for n in os.environ if n.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or "proxy" in n.lower()
        ]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "20")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "20")
        yield server
