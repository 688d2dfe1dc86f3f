"""``--config FILE.yaml``: flags out of a file, under their own names. The command line wins."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.system.suggestions import did_you_mean


class ConfigFile(argparse.Action):
    """Stores what a file says, parsed as flags are, in a namespace of its own (see `with_config_file`)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Read the file named by ``values``. Exits with an error that names the file and the key."""
        said = argparse.Namespace()
        parser.source = f"{values}: "
        for key, value in _read(parser, values).items():
            if arguments := _arguments(parser, str(key), value):
                _, rest = parser.parse_known_args(arguments, said)
                if rest:
                    parser.error(f"{key}: unexpected value {rest[0]!r}")
        parser.source = ""
        namespace.config = said


def with_config_file(namespace: argparse.Namespace) -> argparse.Namespace:
    """Merge the command line over the file of its --config."""
    said = {name: value for name, value in vars(namespace).items() if name != "config" and value is not None}
    file = vars(getattr(namespace, "config", argparse.Namespace()))
    if "model" in said or "model_tag" in said:
        file = {name: value for name, value in file.items() if name != "model"}
    return argparse.Namespace(**{"model_tag": None, **file, **said})


def _read(parser: Any, path: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        parser.error("--config needs PyYAML: pip install pyyaml")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"cannot be read ({error.strerror}); give the path of a YAML file of flags")
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # not in full: a file may hold keys
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        parser.error(f"is not valid YAML{where}: it takes a flag a line, as in `port: 8001`")
    if content is not None and not isinstance(content, dict):
        parser.error("must hold flags and their values, as in `port: 8001`")
    found: dict[Any, Any] = content or {}
    return found


def _arguments(parser: argparse.ArgumentParser, key: str, value: Any) -> list[str]:
    """One entry as arguments; none where it says what is so without it."""
    flag = "--" + key.replace("_", "-")
    options = parser._option_string_actions
    action = options.get(flag)
    if action is None or action.dest in ("help", "config"):
        known = [name[2:] for name in options if name.startswith("--") and name not in ("--help", "--config")]
        parser.error(f"unknown key {key!r}{did_you_mean(key, known)}")
    if value is None or (not value and action.dest in ("_not_supported", "_no_effect")):
        return []
    if isinstance(value, bool) and isinstance(action, argparse.BooleanOptionalAction):
        if value:
            return [flag]
        return [flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)]
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{key}: must be true or false, got {value!r}")
        return [flag] if value else []
    if isinstance(value, list):
        if action.nargs not in ("+", "*"):
            parser.error(f"{key}: takes one value, got a list")
        return [flag, *map(_text, value)]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)
