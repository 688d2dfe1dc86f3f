"""A tiny checkpoint that reads images, for all tests of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.images import make_tokenizer
from support.vision import CASES

IMAGE = 260  # the tokenizer's placeholder
SIZE = {"height": 32, "width": 32}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with a tokenizer."""
    path = tmp_path_factory.mktemp("llava")
    CASES["llava"].save(path)
    tokenizer, config = make_tokenizer(), json.loads((path / "config.json").read_text())
    assert tokenizer.convert_tokens_to_ids(["<image>"]) == [IMAGE]
    (path / "config.json").write_text(json.dumps(config | {"image_token_index": IMAGE}))
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    size = {"size": {"shortest_edge": 32}, "crop_size": SIZE}
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"} | size))
    return path
