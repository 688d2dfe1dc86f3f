"""All flags of `octavo serve`."""

from __future__ import annotations

import argparse

from octavo.flags.config_file import ConfigFile
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.flags.parser import CommandParser
from octavo.flags.server_flags import add_server_flags
from octavo.flags.vllm_flags import add_vllm_flags


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model and the flags of `octavo serve`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        action=ConfigFile,
        default=argparse.SUPPRESS,
        help="Read flags from a YAML file, by their names. Flags on the command line win (default: none)",
    )
    add_engine_flags(parser.add_argument_group("engine"))
    add_server_flags(parser.add_argument_group("server"))
    add_vllm_flags(parser)
    if isinstance(parser, CommandParser):
        parser.takes_vllm_flags = True
