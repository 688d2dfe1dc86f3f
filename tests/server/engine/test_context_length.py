"""`max_model_len` and the positions that a model was made for."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.args import EngineArgs
from octavo.engine.context_length import ALLOWING
from octavo.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOWING:
        monkeypatch.delenv(name, raising=False)


def length(source: Path, tmp_path: Path, asked: int | None, positions: int = 100, **fields: Any) -> int:
    """The length that the engine settles on for ``source`` with other fields in its config.json."""
    model = tmp_path / "model"
    shutil.copytree(source, model, dirs_exist_ok=True)
    config = {**json.loads((model / "config.json").read_text()), "max_position_embeddings": positions, **fields}
    (model / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return EngineArgs(str(model), max_model_len=asked).create_engine_config(progress=False).model.max_model_len


@pytest.mark.parametrize(
    ("rope", "longest", "default"),
    [
        ({"rope_parameters": None}, 100, 100),
        ({"rope_parameters": DEFAULT}, 100, 100),  # as transformers writes it for every model
        ({"rope_parameters": None, "rope_scaling": YARN}, 400, 400),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, 400, 400),
        ({"rope_parameters": None, "rope_scaling": {**YARN, "original_max_position_embeddings": 25}}, 100, 100),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, 200, 100),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, 300, 100),
    ],
)
def test_a_length_is_taken_up_to_the_positions_as_rope_stretches_them(
    rope: dict[str, Any], longest: int, default: int, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_checkpoints["llama"]
    assert length(source, tmp_path, longest, **rope) == longest
    assert length(source, tmp_path, None, **rope) == default
    with pytest.raises(ConfigError, match=rf"max_model_len {longest + 1} is above the model's {longest} positions"):
        length(source, tmp_path, longest + 1, **rope)


@pytest.mark.parametrize("name", ALLOWING)
def test_the_environment_allows_more_with_a_warning(
    name: str,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = tiny_checkpoints["llama"]
    with pytest.raises(ConfigError, match=f"rope_scaling.*{ALLOWING[0]}=1"):
        length(source, tmp_path, 150)
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        assert length(source, tmp_path, 150) == 150
    assert "max_model_len 150 is above the model's 100 positions" in caplog.text


def test_learned_positions_end_where_their_table_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **sizes}))
    monkeypatch.setenv(ALLOWING[0], "1")
    args = EngineArgs(str(tmp_path), max_model_len=65, load_format="dummy")
    with pytest.raises(ConfigError, match=r"64 positions .* table of positions has no more; lower it"):
        args.create_engine_config(progress=False)
