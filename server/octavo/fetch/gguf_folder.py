"""The folder of Hugging Face files that is derived from a GGUF header, made once and kept in the cache.

All that it holds follows from the header, so it is keyed by the header's sha256: a 40 GB file need not be read to
find it. Which key a file has is remembered by path, size and time of change, so that a warm start does not even parse
the header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.fetch.cache import cache_dir, find_seeded, locked, publish, scratch, write_json, write_json_atomically
from octavo.gguf.file_names import all_parts
from octavo.interface.model_files import NO_TOKENIZER

if TYPE_CHECKING:
    from octavo.gguf.header import GGUFFile

_VERSION = 8  # raise it when what is derived changes


def derived_directory(path: Path, *, download_dir: str | None = None) -> Path:
    """The folder with config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja.

    A vocabulary that cannot be converted is left out, and a note says why. Raises ModelError.
    """
    root = cache_dir(download_dir) / "gguf"
    stamp: list[int] = [_VERSION]
    for part in map(path.with_name, all_parts(path.name)):
        try:
            stat = os.stat(part)
        except OSError as error:
            raise ModelError(f"cannot read {part}: {error.strerror or error}") from None
        stamp += [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    index = root / "index" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"
    known = _read_index(index)
    if known.get("stamp") == stamp and (folder := root / str(known.get("key"))).exists():
        return folder
    from octavo.gguf.split import open_gguf  # and numpy with it, which a warm start does without

    file = open_gguf(path)
    key = f"{file.header_sha256()}-v{_VERSION}"
    if seed := find_seeded(f"gguf/{key}"):
        return seed
    folder = root / key
    if not folder.exists():
        with locked(root / "tmp" / key), scratch(root / "tmp" / f"{key}.d") as made:
            if not folder.exists():
                _derive(file, made)
                publish(made, folder)
    with contextlib.suppress(ModelError, PermissionError), locked(index):  # a read-only cache is only slower
        write_json_atomically(index, {"path": str(path), "stamp": stamp, "key": key})
    return folder


def _read_index(index: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        return known
    except (OSError, ValueError):
        return {}


def _derive(file: GGUFFile, into: Path) -> None:
    from octavo.gguf.config import generation_config, hf_config
    from octavo.gguf.pooling import pooling_modules
    from octavo.gguf.tokenizer import chat_templates, tokenizer_config, tokenizer_json

    try:
        write_json(into / "config.json", hf_config(file))
        write_json(into / "generation_config.json", generation_config(file))
        for name, content in pooling_modules(file).items():
            (into / name).parent.mkdir(exist_ok=True)
            write_json(into / name, content)
    except (TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise ModelError(f"{file.path}: its header holds an invalid value ({error}); fetch it again") from None
    try:
        vocabulary, config = tokenizer_json(file.metadata, file.path), tokenizer_config(file.metadata)
        templates = chat_templates(file.metadata)
    except ModelError as error:
        (into / NO_TOKENIZER).write_text(str(error), encoding="utf-8")
        return
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        (into / NO_TOKENIZER).write_text(f"the vocabulary in {file.path} is invalid ({error})", encoding="utf-8")
        return
    write_json(into / "tokenizer.json", vocabulary)
    write_json(into / "tokenizer_config.json", config)
    for name, template in templates.items():
        target = into / "chat_template.jinja"
        if name != "default":
            target = into / "additional_chat_templates" / f"{Path(name).name}.jinja"
            target.parent.mkdir(exist_ok=True)
        target.write_text(template, encoding="utf-8")
