"""Compute how large a request's body may be for the engine of a model, as far as its spec tells. Pure."""

from __future__ import annotations

import re

from octavo_operator.api import LLMDeployment
from octavo_operator.render.router.replies import MAX_BODY_BYTES

_FLAG = "--max-request-bytes"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])([iI][bB]?|[bB])?)?")  # as the engine reads it
_TEXT_BYTES, _TOKEN_BYTES = 4 * 2**20, 32  # the engine's default for a model that takes text only


def most_bytes(deployment: LLMDeployment) -> int | None:
    """None: the engine decides, by the model's files, or it takes as much as a router."""
    engine = deployment.spec.engine
    flags = [one.replace("_", "-") if one.startswith("--") else one for one in engine.args]
    if given := _value(engine.args, flags, _FLAG):
        size = parse_size(given)
        return size if size is not None and size < MAX_BODY_BYTES else None
    own = any(one.partition("=")[0] in (_FLAG, "--max-model-len", "--limit-mm-per-prompt") for one in flags)
    images = engine.multimodal.limit_per_prompt.image if engine.multimodal else None
    if own or images != 0 or not isinstance(engine.max_model_len, int):
        return None
    size = max(_TEXT_BYTES, _TOKEN_BYTES * engine.max_model_len)
    return size if size < MAX_BODY_BYTES else None


def _value(arguments: tuple[str, ...], flags: list[str], flag: str) -> str | None:
    """The last one counts."""
    for index in reversed(range(len(flags))):
        name, is_written, _ = flags[index].partition("=")
        if name == flag:
            return arguments[index].partition("=")[2] if is_written else "".join(arguments[index + 1 : index + 2])
    return None


def parse_size(text: str) -> int | None:
    """Bytes; None: it is no size, perhaps a variable of the container, or none."""
    match = _SIZE.fullmatch(text.strip())
    if not match or (match[2] is None and "." in match[1]):
        return None
    number, unit, suffix = match.groups()
    if not unit:
        return int(number) or None
    binary = suffix.lower() != "b" if suffix else unit.isupper()
    return round(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1)) or None
