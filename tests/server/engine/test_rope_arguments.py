"""`rope_scaling` and `rope_theta` in config.json's place, as older versions of vLLM take them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.args import EngineArgs
from octavo.errors import ModelError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def checkpoint(tmp_path: Path, source: Path, **fields: Any) -> str:
    """``source`` with other fields in its config.json; None: without that one."""
    shutil.copytree(source, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return str(tmp_path / "model")


def rope(model: str, **arguments: Any) -> dict[str, Any]:
    return EngineArgs(model, **arguments).create_engine_config(progress=False).model.text.rope()


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_theta": 5000.0, "rope_parameters": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {
            "rope_theta": None,
            "rope_parameters": None,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        },
    ],
)
def test_the_base_stays_wherever_it_stands_and_scaling_is_replaced(
    stated: dict[str, Any], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, tiny_checkpoints["llama"], **stated)
    found = rope(model, rope_scaling=YARN)
    assert found.items() >= {**YARN, "rope_theta": 5000.0}.items()
    assert rope(model, rope_scaling=YARN, rope_theta=7000.0)["rope_theta"] == 7000.0
    alone = rope(model, rope_theta=7000.0)
    assert alone["rope_theta"] == 7000.0 and alone["rope_type"] == rope(model)["rope_type"]


def test_layers_that_differ_are_left_to_hf_overrides(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    differing = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = checkpoint(tmp_path, tiny_checkpoints["llama"], rope_parameters=differing)
    with pytest.raises(ModelError, match="hf_overrides"):
        rope(model, rope_scaling=YARN)
