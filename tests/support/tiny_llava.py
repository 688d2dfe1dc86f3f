"""A tiny random LLaVA with all that a chat with images needs."""

from __future__ import annotations

import json
from pathlib import Path

from support.images import make_tokenizer
from support.vision import CASES

TOKENS = 16  # of an image
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


def save_tiny_llava(path: Path) -> None:
    """Its files, into a folder that is there."""
    CASES["llava"].save(path)
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    config = json.loads((path / "config.json").read_text())
    config["image_token_index"] = config["image_token_id"] = tokenizer.convert_tokens_to_ids(["<image>"])[0]
    (path / "config.json").write_text(json.dumps(config))
