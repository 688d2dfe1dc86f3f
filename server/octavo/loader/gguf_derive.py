"""The folder of Hugging Face files that is derived from a GGUF header, made once and kept in the cache.

All that it holds follows from the header, so it is keyed by the header's sha256: a 40 GB file need not be read to find it. Which
key a file has is remembered by path, size and time of change, so that a warm start does not even parse the header.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.loader.cache import cache_dir, locked, publish, scratch, write_json
from octavo.loader.gguf_config import generation_config, hf_config
from octavo.loader.gguf_reader import GGUFFile
from octavo.loader.gguf_tokenizer import chat_templates, tokenizer_config, tokenizer_json

_VERSION = 1  # raise it when what is derived changes


def derived_directory(path: Path, *, need_tokenizer: bool = True) -> Path:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja of a GGUF file.

    With ``need_tokenizer`` False a vocabulary that cannot be converted is left out. Raises ModelError.
    """
    root = cache_dir() / "gguf"
    stat = os.stat(path)
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino, _VERSION]
    index = root / "index" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"
    known = _read_index(index)
    if known.get("stamp") == stamp:
        folder = root / known["key"]
        if _complete(folder, need_tokenizer):
            return folder
    file = GGUFFile(path)
    key = f"{file.header_sha256()}-v{_VERSION}"
    folder = root / key
    if not _complete(folder, need_tokenizer):
        with locked(folder), scratch(root / "tmp" / key) as made:
            if not _complete(folder, need_tokenizer):
                _derive(file, made, need_tokenizer)
                root.mkdir(parents=True, exist_ok=True)
                if folder.exists():  # it lacked the tokenizer
                    os.rename(folder, made.with_name(made.name + "-old"))
                publish(made, folder)
    with locked(index), scratch(root / "tmp" / index.stem) as made:
        write_json(made / index.name, {"path": str(path), "stamp": stamp, "key": key})
        publish(made / index.name, index)
    return folder


def _complete(folder: Path, need_tokenizer: bool) -> bool:
    return (folder / ("tokenizer.json" if need_tokenizer else "config.json")).exists()


def _read_index(index: Path) -> dict[str, Any]:
    try:
        return json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _derive(file: GGUFFile, into: Path, need_tokenizer: bool) -> None:
    write_json(into / "config.json", hf_config(file))
    write_json(into / "generation_config.json", generation_config(file))
    try:
        vocabulary = tokenizer_json(file.metadata, file.path)
    except ModelError:
        if need_tokenizer:
            raise
        return
    write_json(into / "tokenizer.json", vocabulary)
    write_json(into / "tokenizer_config.json", tokenizer_config(file.metadata))
    for name, template in chat_templates(file.metadata).items():
        target = into / "chat_template.jinja"
        if name != "default":
            target = into / "additional_chat_templates" / f"{Path(name).name}.jinja"
            target.parent.mkdir(exist_ok=True)
        target.write_text(template, encoding="utf-8")
