"""``octavo show MODEL``: what a model on this machine is."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo show`."""
    parser.add_argument("model", metavar="MODEL", help="Name of a fetched model, a folder or a .gguf file")
    parser.add_argument(
        "--download-dir", help="Folder of fetched models (default: the caches of Octavo and Hugging Face)"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Print how the chat template writes tool calls and reasoning, what switches reasoning, and what a next "
        "turn loses of the cache (default: what the files say of the model)",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object (default: lines)")


def run(args: argparse.Namespace) -> int:
    """Prints what the files say. Raises ModelError."""
    if args.chat:
        return _show_chat(args)
    found = _described(args.model, args.download_dir)
    if args.json:
        print(json.dumps(found))
        return 0
    _print_lines(found)
    print(f"\n`octavo plan {args.model}` says what it takes of a device, `octavo run {args.model}` talks to it.")
    return 0


def _print_lines(found: dict[str, Any]) -> None:
    width = max(map(len, found))
    for name, value in found.items():
        if value not in (None, "", {}):
            text = ", ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)
            print(f"{name.replace('_', ' ').ljust(width)}  {text}")


def _show_chat(args: argparse.Namespace) -> int:
    """Prints what the chat template shows. Raises ModelError where there is none."""
    from octavo.chat.options import ChatOptions
    from octavo.chat.own_format import with_response_template
    from octavo.chat.report import chat_report, in_words
    from octavo.errors import ModelError
    from octavo.fetch.installed import find_installed
    from octavo.fetch.model_names import looks_local
    from octavo.fetch.sources import resolve_model
    from octavo.text.tokenizer import Tokenizer

    path = (
        Path(args.model).expanduser() if looks_local(args.model) else find_installed(args.model, args.download_dir).path
    )
    tokenizer = Tokenizer.from_files(resolve_model(str(path), download_dir=args.download_dir, progress=False))
    try:
        template = tokenizer.get_chat_template(None, tools=True)
    except ValueError as error:
        raise ModelError(f"{args.model}: {error}") from None
    report = chat_report(template, with_response_template(ChatOptions(), tokenizer))
    if args.json:
        print(json.dumps(report.as_dict()))
        return 0
    _print_lines(in_words(report))
    return 0


def _described(name: str, download_dir: str | None) -> dict[str, Any]:
    from octavo.engine.args import EngineArgs
    from octavo.errors import ModelError, OctavoError
    from octavo.fetch.description import describe
    from octavo.fetch.installed import find_installed
    from octavo.fetch.model_config import load_generation_config, load_hf_config
    from octavo.fetch.model_names import ALIAS_SAMPLING, looks_local
    from octavo.fetch.progress import format_bytes
    from octavo.fetch.sources import resolve_model
    from octavo.interface.sampling_params import recommended_sampling
    from octavo.plan.measure import kv_bytes_per_token

    path = Path(name).expanduser() if looks_local(name) else find_installed(name, download_dir).path
    files = resolve_model(str(path), download_dir=download_dir, progress=False)
    said = describe(files)
    found: dict[str, Any] = {
        "name": name,
        "architecture": said.architecture,
        "parameters": said.parameter_size,
        "size": format_bytes(said.num_bytes),
        "format": said.format,
        "quantization": said.quantization,
        "context": said.context_length,
    }
    try:
        config = load_hf_config(files)
        found["served"] = "yes"
    except ModelError as error:
        config = {}
        found["served"] = f"no: {error}"
    with suppress(OctavoError):
        engine = replace(EngineArgs(model=str(path)).engine_config(files), device="cpu")
        found["kv_bytes_per_token"] = kv_bytes_per_token(engine)
    fields = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "attention_heads": "num_attention_heads",
        "key_value_heads": "num_key_value_heads",
        "vocabulary": "vocab_size",
    }
    found |= {title: config.get(field) for title, field in fields.items()}
    sampling = ALIAS_SAMPLING.get(name.removesuffix(":latest"), {})
    found["sampling"] = {**sampling, **recommended_sampling(load_generation_config(files))}
    templates = [files.path / "chat_template.jinja", *(files.path / "additional_chat_templates").glob("*.jinja")]
    configured = files.path / "tokenizer_config.json"
    in_config = configured.exists() and '"chat_template"' in configured.read_text(encoding="utf-8")
    found["chat_template"] = "yes" if in_config or any(file.exists() for file in templates) else "no"
    return found | {"license": said.license, "path": str(path)}
