"""Reading JSON bodies within limits of size and number of values."""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo.entrypoints.bodies import Share
from octavo.entrypoints.errors import APIError, from_validation
from octavo.entrypoints.state import ServerState
from octavo.multimodal.pieces import Pieces

Body = TypeVar("Body", bound=BaseModel)
Path = tuple[str | None, ...]  # keys of objects on the way to a value; None: any item of a list

_LARGE_BODY = 1 << 18  # bytes
_MAX_DISCARDED = 64 << 20  # bytes beyond the limit that are read before the error is sent
_BASE64 = (string.ascii_letters + string.digits + "+/=-_").encode()
_LEAST_CUT = 1 << 14  # bytes of base64 that are worth cutting out
_ESCAPE = 6  # bytes of \uXXXX


async def read_body(
    request: Request,
    model: type[Body],
    state: ServerState,
    any_type: bool = False,
    images: Collection[Path] = (),
) -> Body:
    """The JSON body as a ``model``; ``any_type``: whatever Content-Type says. Raises APIError: 400, 413, 415 or 429.

    ``images`` are the places of images, where ``model`` takes `Pieces`: long texts there are left in them.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not any_type and kind and kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"Content-Type must be application/json, got {kind[:100]!r}")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise APIError(415, f"Content-Encoding must be identity, got {coding[:100]!r}: send the body uncompressed")
    with state.bodies.share() as share:
        why = " (--max-request-bytes)"
        if not state.engine.config.model.reads_images:
            why += f": {state.model_name} takes text only, no images"
        received = _Received()
        await _read_pieces(request, received, state.max_body_bytes, state.max_body_values, share, why)
        try:
            if sum(map(len, received.pieces)) < _LARGE_BODY:
                return model.model_validate_json(_without_mark(b"".join(received.pieces)))
            await asyncio.sleep(0)  # let other requests run between copying and parsing,
            value = await state.engine.run_in_thread(_decode_large, received, images)
            await asyncio.sleep(0)  # and validating
            return model.model_validate(value)
        except ValidationError as error:
            raise from_validation(error) from None


async def read_bytes(request: Request, max_bytes: int, share: Share) -> bytearray:
    """A body that is no JSON, in memory once. Raises a 413 if it is larger than ``max_bytes``, and a 429 where all
    bodies take too much."""
    received = _Whole()
    await _read_pieces(request, received, max_bytes, None, share)
    return received.data


@dataclass
class _Received:
    """A body, and which of its pieces are nothing but base64 within a text."""

    pieces: list[bytes] = field(default_factory=list)
    is_base64: list[bool] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all."""
        self.pieces, self.is_base64 = [], []

    def add(self, piece: bytes) -> bool:
        """Take the next piece; whether it is one of those."""
        last = self.pieces[-1] if self.pieces else b""
        inside = self.is_base64[-1:] == [True] or (len(last) >= _ESCAPE and b"\\" not in last[-_ESCAPE:])
        found = inside and len(piece) >= _LEAST_CUT and not piece.translate(None, _BASE64)
        self.pieces.append(piece)
        self.is_base64.append(found)
        return found


@dataclass
class _Whole:
    """A body in one piece, which grows in place."""

    data: bytearray = field(default_factory=bytearray)

    def clear(self) -> None:
        """Forget all."""
        self.data = bytearray()

    def add(self, piece: bytes) -> bool:
        """Take the next piece."""
        self.data += piece
        return False


async def _read_pieces(
    request: Request,
    received: _Received | _Whole,
    max_bytes: int,
    max_values: int | None,
    share: Share,
    why: str = "",
) -> None:
    """``max_values``: of JSON; None: it is none. ``why``: where the limit comes from, and what may have exceeded it."""
    try:
        length = int(request.headers.get("content-length", 0))
    except ValueError:
        length = 0
    size = values = 0
    if length <= _MAX_DISCARDED + max_bytes:
        async for chunk in request.stream():
            size += len(chunk)
            if size > _MAX_DISCARDED + max_bytes:
                break
            fits = size <= max_bytes and (max_values is None or values <= max_values)
            if not (fits and received.add(chunk)) and max_values is not None:
                values += chunk.count(b",") + 3 * chunk.count(b"{")  # objects are the slowest to parse
            if fits and (max_values is None or values <= max_values):
                if size >= _LARGE_BODY:
                    if not share.add(len(chunk)):
                        raise APIError(
                            429,
                            f"Bodies of requests under way take more than {share.of.limit} bytes; send it again",
                            headers={"retry-after": "1", "connection": "close"},
                        )
                    await share.of.turn()  # what is read next has to wait for it
            else:  # clients read no response while they send: read the rest and discard it
                received.clear()
    if max(size, length) > max_bytes:
        raise APIError(
            413,
            f"The body is larger than {max_bytes} bytes{why}; send less",
            headers={"connection": "close"},
        )
    if max_values is not None and values > max_values:
        raise APIError(413, f"The body holds more than {max_values} values, more than the model could take; send less")


def _without_mark(body: bytes) -> bytes:
    """The body without the mark of UTF-8 that Windows' programs begin a text with."""
    return body.removeprefix(codecs.BOM_UTF8)


def _decode_json(body: bytes) -> Any:
    """Twice as fast as pydantic, with shorter error messages. Raises APIError."""
    try:
        return msgspec.json.decode(_without_mark(body))
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None


def _decode_large(received: _Received, images: Collection[Path] = ()) -> Any:
    """Decode as `_decode_json` does, but in a thread.

    A decoder holds the GIL until it is done, which is long for megabytes of images. So pieces that are nothing but
    base64 are cut out before, and put back one text at a time. Texts at a path in ``images`` become `Pieces`.
    """
    mark = secrets.token_hex(16)  # which no client can guess
    kept: list[bytes] = []
    cut: list[list[bytes]] = []
    follows = False  # whether the last piece was cut out
    for piece, is_base64 in zip(received.pieces, received.is_base64, strict=True):
        if not is_base64:
            kept.append(piece)
        elif follows:
            cut[-1].append(piece)
        else:
            kept.append(f"{mark}{len(cut):08}".encode())
            cut.append([piece])
        follows = is_base64
    value = _decode_json(b"".join(kept))
    del kept
    if not cut:
        return value
    holes = re.compile(mark + r"(\d{8})")

    def whole(text: str, path: Path | None) -> Any:
        if mark not in text:
            return text
        parts = list(enumerate(holes.split(text)))
        if path in images:
            found = [cut[int(part)] if at % 2 else [part.encode(errors="replace")] for at, part in parts]
            return Pieces([piece for part in found for piece in part if piece])
        texts = [[piece.decode() for piece in cut[int(part)]] if at % 2 else [part] for at, part in parts]
        return "".join(piece for part in texts for piece in part)

    try:
        return _mapped(value, whole)
    except RecursionError:
        raise APIError(400, "The body is not valid JSON: it is too deep", code="invalid_json") from None


def _mapped(value: Any, change: Callable[[str, Path | None], Any], path: Path = ()) -> Any:
    """A JSON value with its texts changed, each with the path of its place; keys have none."""
    if isinstance(value, str):
        return change(value, path)
    if isinstance(value, list):
        return [_mapped(item, change, (*path, None)) for item in value]
    if isinstance(value, dict):
        return {change(key, None): _mapped(item, change, (*path, key)) for key, item in value.items()}
    return value
