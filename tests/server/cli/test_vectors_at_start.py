"""`octavo serve` refuses a pooling that gives no vectors of the model before its weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from support.encoders import make_encoder, write_modules

from octavo.cli import serve
from octavo.cli.main import main


class ReachedError(Exception):
    """The process that computes would be told its configuration now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    process = Mock()
    process.configure.side_effect = ReachedError
    monkeypatch.setattr(serve, "start_cores", lambda args: process)
    return lambda path, *flags: main(["serve", str(path), "--port", "0", *flags])


def test_dense_layers_take_what_the_models_own_pooling_gives(
    started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_encoder("bert", tmp_path)
    dense = {"in_features": 128, "out_features": 8, "bias": False}
    write_modules(tmp_path, ("Pooling", {"pooling_mode": ["cls", "mean"]}), ("Dense", dense))
    save_file({"linear.weight": torch.zeros(8, 128)}, tmp_path / "2_Dense" / "model.safetensors")
    capsys.readouterr()
    assert started(tmp_path, "--embedding-pooling", "mean") == 1
    said = capsys.readouterr().err
    assert "--embedding-pooling must be left out: mean gives 64 numbers" in said and said.count("\n") == 1
    with pytest.raises(ReachedError):
        started(tmp_path)


def test_missing_dense_layers_need_a_pooling(started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder("embedding-gemma", tmp_path)
    capsys.readouterr()
    assert started(tmp_path) == 1
    said = capsys.readouterr().err
    assert "lacks modules.json" in said and "--embedding-pooling" in said and said.count("\n") == 1
    with pytest.raises(ReachedError):
        started(tmp_path, "--embedding-pooling", "mean")
