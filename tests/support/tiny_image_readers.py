"""Tiny random models with all that a chat with images needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.images import make_tokenizer
from support.vision import CASES

TOKENS = 16  # of an image of the LLaVA
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


def save_tiny_llava(path: Path) -> None:
    """Its files, into a folder that is there."""
    _save("llava", path, {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}})


def save_tiny_idefics3(path: Path) -> None:
    """The same of one that reads images of more than 32 pixels a side in tiles."""
    _save("idefics3", path, {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}})


def _save(family: str, path: Path, sizes: dict[str, Any]) -> None:
    CASES[family].save(path)
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    config = json.loads((path / "config.json").read_text())
    config["image_token_index"] = config["image_token_id"] = tokenizer.convert_tokens_to_ids(["<image>"])[0]
    (path / "config.json").write_text(json.dumps(config))
