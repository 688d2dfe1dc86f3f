"""The text of a request's prompt in any dialect: what prefixes are compared by. Pure.

The text need not be what the engine computes. It has to grow at its end alone from one turn of a conversation to the
next; a wrong comparison costs a prefix hit, never an answer. So what would take long to read is not read: whoever
picks has one thread, and all requests wait for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo_router.blocks import BLOCK_BYTES, MAX_TEXT, Prompt, cut
from octavo_router.keepers import named_in_body

_MAX_JSON = 1 << 23  # bytes beside images: with a character beyond U+FFFF Python takes four times as much
_MAX_VALUES = 1 << 18  # of JSON: they take 60 ms
_MAX_STRINGS = 1 << 17  # of a body that is so large that its images are taken out first
_MAX_PARTS = 1 << 14  # messages, parts of them, and texts: those of a prompt that count
_DATA = re.compile(rb"(?:data:[-\w.\\/+;=]*,)?[-\w\\+/]+=*")  # base64, with or without a head
_LEAST_DATA = 4096  # bytes of a string that may be an image
# Ollama's "images" stand before the text of their message, as in its prompts.
_CHUNK_FIELDS = (
    "images",
    "text",
    "content",
    "image_url",
    "url",
    "source",
    "data",
    "input",
    "arguments",
    "output",
    "tool_calls",
)
IMAGE_BLOCKS = 16  # that an image counts for, whatever its size: the tokens that it takes are about those of their text
_IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})  # of parts in the dialects


def read_prompt(body: bytes, salt: str = "") -> Prompt:
    """The prompt of a request's body, in a time that is bounded whatever the body is."""
    try:
        request = json.loads(_bounded(body))
    except (ValueError, RecursionError):
        return Prompt()
    if not isinstance(request, dict):
        return Prompt()
    text = _Text()
    _read(request, text)
    data = "\0".join(text.pieces).encode(errors="surrogatepass")[:MAX_TEXT]
    model = request_text(request, "model")
    # Others' prompts: they share nothing, whatever they say.
    root = hash((model, request_text(request, "cache_salt"), salt))
    return cut(data, root, text.size, model, named_in_body(request))


def request_text(request: dict[str, Any], name: str) -> str:
    """The field, where it is a string."""
    value = request.get(name)
    return value if isinstance(value, str) else ""


def _bounded(body: bytes) -> bytes:
    """The body, with a digest for each image where it would be too large. Raises ValueError."""
    if len(body) > _MAX_JSON:
        pieces = body.split(b'"', _MAX_STRINGS)
        if len(pieces) <= _MAX_STRINGS:
            body = b'"'.join(map(_shorter, pieces))
    if len(body) > _MAX_JSON or (len(body) > 2 * _MAX_VALUES and _values(body) > _MAX_VALUES):
        raise ValueError("it takes too long to read")
    return body


def _values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON: its commas and opening brackets, those within text
    included."""
    return len(body) - len(body.translate(None, b",[{"))


def _shorter(piece: bytes) -> bytes:
    """Return the text between two quotes of JSON, or a stand-in if it is an image."""
    if len(piece) < _LEAST_DATA or not _DATA.fullmatch(piece[:_LEAST_DATA]):
        return piece
    plain = piece.replace(rb"\/", b"/")  # as some clients write it
    return piece if b"\\" in plain else _image(plain).encode()


def _image(content: bytes) -> str:
    """Return a stand-in for an image, of the same size for all. An image given by digest is represented by the
    digest."""
    size = IMAGE_BLOCKS * BLOCK_BYTES
    if len(content) == size and content[:16] * (size // 16) == content:
        return content.decode()
    return f"{hash(content) % 2**64:016x}" * (size // 16)


class _Text:
    """The pieces of a prompt, as many as count. `size`: of all, in characters."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.size = self._parts = 0

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    @property
    def is_full(self) -> bool:
        """True if nothing more counts."""
        return self.size >= MAX_TEXT or self._parts >= _MAX_PARTS

    def has_room(self) -> bool:
        """True if another part counts, which does from now on."""
        if self.is_full:
            return False
        self._parts += 1
        return True


def _read(request: dict[str, Any], text: _Text) -> None:
    """Return the parts of a prompt in the order in which templates place them: tools, instructions, then messages,
    prompt or input."""
    if tools := request.get("tools"):
        text.add(json.dumps(tools, sort_keys=True))
    _add({"images": request.get("images")}, text, 9)
    for name in ("system", "instructions", "messages", "prompt", "input"):
        _add(request.get(name), text, 9)


def _add(value: object, text: _Text, depth: int, image: bool = False) -> None:
    """``image``: texts are the address or the content of one, which stands for the whole of it."""
    if not depth or not text.has_room():
        return
    if isinstance(value, str):
        text.add(_image(value.encode(errors="surrogatepass")) if image else value)
    elif isinstance(value, list):
        if value and all(isinstance(one, int) for one in value):
            text.add(",".join(map(str, value)) + ",")  # token ids
            return
        for one in value:
            if text.is_full:
                return
            _add(one, text, depth - 1, image)
    elif isinstance(value, dict):
        if isinstance(role := value.get("role"), str):
            text.add(role)
        if isinstance(name := value.get("name"), str):
            text.add(name)
        image = image or request_text(value, "type") in _IMAGE_TYPES
        for field in _CHUNK_FIELDS:
            if field in value:
                _add(value[field], text, depth - 1, image or field == "images")
