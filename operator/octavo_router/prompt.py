"""The text of a request's prompt in any dialect, cut into hashed blocks: what prefixes are compared by. Pure.

The text need not be what the engine computes. It has to grow at its end alone from one turn of a conversation to the
next; a wrong comparison costs a prefix hit, never an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 128
MAX_BLOCKS = 2048  # later text does not count
# Ollama's "images" stand before the text of their message, as in its prompts.
_CHUNK_FIELDS = (
    "images", "text", "content", "image_url", "url", "source", "data", "input", "arguments", "output", "tool_calls"
)  # fmt: skip
IMAGE_BLOCKS = 16  # that an image counts for, whatever its size: the tokens that it takes are about those of their text
_IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})  # of parts in the dialects


@dataclass(frozen=True)
class Prompt:
    """A hash for each whole block of the prompt's beginning, of all text before the block's end, and one of all of the
    prompt. They are equal within this process and for one salt only. Empty: there is no prompt, or it is no JSON.
    `model`: the name in the request."""

    blocks: Sequence[int] = ()
    text: int = 0
    model: str = ""


def read_prompt(body: bytes, salt: str = "") -> Prompt:
    """The prompt of a request's body."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return Prompt()
    if not isinstance(request, dict):
        return Prompt()
    text, size, limit = [], 0, BLOCK_BYTES * MAX_BLOCKS
    for piece in _pieces(request):
        text.append(piece)
        size += len(piece)
        if size >= limit:
            break
    data = "\0".join(text).encode(errors="surrogatepass")[:limit]
    # Others' prompts: they share nothing, whatever they say.
    model = request_text(request, "model")
    chain = hash((model, request_text(request, "cache_salt"), salt))
    hashes = []
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        chain = hash((chain, data[end - BLOCK_BYTES : end]))
        hashes.append(chain)
    return Prompt(hashes, hash((chain, data[len(hashes) * BLOCK_BYTES :], size)), model)


def request_text(request: dict[str, Any], name: str) -> str:
    """The field, where it is a string."""
    value = request.get(name)
    return value if isinstance(value, str) else ""


def _pieces(request: dict[str, Any]) -> Iterator[str]:
    """What stands first in prompts comes first: tools, instructions, then messages, prompt or input."""
    if tools := request.get("tools"):
        yield json.dumps(tools, sort_keys=True)
    yield from _texts({"images": request.get("images")}, 8)
    for name in ("system", "instructions", "messages", "prompt", "input"):
        yield from _texts(request.get(name), 8)


def _texts(value: object, depth: int, image: bool = False) -> Iterator[str]:
    """``image``: texts are the address or the content of one, which stands for the whole of it."""
    if isinstance(value, str):
        yield f"{hash(value) % 2**64:016x}" * (IMAGE_BLOCKS * BLOCK_BYTES // 16) if image else value
    elif isinstance(value, list) and depth:
        if value and all(isinstance(one, int) for one in value):
            yield ",".join(map(str, value)) + ","  # token ids
            return
        for one in value:
            yield from _texts(one, depth - 1, image)
    elif isinstance(value, dict) and depth:
        if isinstance(role := value.get("role"), str):
            yield role
        if isinstance(name := value.get("name"), str):
            yield name
        image = image or request_text(value, "type") in _IMAGE_TYPES
        for field in _CHUNK_FIELDS:
            yield from _texts(value.get(field), depth - 1, image or field == "images")
