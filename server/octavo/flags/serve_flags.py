"""All flags of `octavo serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from octavo.engine.args import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags.config_file import ConfigFile
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.flags.fields import from_flags
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


def serve_arguments(
    namespace: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[EngineArgs, ServerArgs]:
    """The arguments of the engine and of the server that a command line and its environment give. Raises ConfigError
    for those that do not fit together."""
    engine_args: EngineArgs = from_flags(EngineArgs, namespace)
    args: ServerArgs = from_flags(ServerArgs, namespace)
    if namespace.model_tag is not None:
        if engine_args.model is not None and engine_args.model != namespace.model_tag:
            raise ConfigError(f"two models are named, {namespace.model_tag} and {engine_args.model}: give one")
        engine_args.model = namespace.model_tag
    args.api_key = args.api_key or _keys_from(environment)
    args.seal_key = args.seal_key or environment.get("OCTAVO_SEAL_KEY") or None
    args.responses_store = args.responses_store or environment.get("OCTAVO_RESPONSES_STORE") or None
    args.replica_address = args.replica_address or environment.get("OCTAVO_REPLICA_ADDRESS")
    args.check()
    engine_args._validate()
    _check_adapters(engine_args, args, environment)
    if args.headless != (engine_args.node_rank > 0):
        raise ConfigError(f"node_rank {engine_args.node_rank}: --headless is for all nodes but 0, which serves")
    return engine_args, args


def _check_adapters(engine_args: EngineArgs, args: ServerArgs, environment: Mapping[str, str]) -> None:
    """Raises ConfigError for options about LoRA adapters that need one that is not given."""
    if not engine_args.enable_lora:
        names = ("lora_modules", "lora_dir", "lora_list", "lora_credentials", "allow_runtime_lora_updating")
        given = [name for name in names if getattr(args, name)]
        if given:
            raise ConfigError(f"{given[0]} needs --enable-lora: give both, or neither")
        return
    if environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"):
        args.allow_runtime_lora_updating = True
    if args.lora_dir is not None and not args.allow_runtime_lora_updating:
        raise ConfigError("lora_dir needs --allow-runtime-lora-updating: give both, or neither")


def _keys_from(environment: Mapping[str, str]) -> list[str]:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        if key := environment.get(name):
            return [key.strip()]
    return []
