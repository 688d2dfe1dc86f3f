"""Pictures in a typed message: paths that are written there, or that a terminal writes where a file is dropped."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from octavo.errors import OctavoError

_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_LONGEST = 4096  # characters of a path
# 'a path', with each quote in it as '\'' or '"'"' (as shells write it), "a path", or a word in which \ precedes a blank
_WORD = re.compile(
    rf"""(?<!\S)(?:'(?P<single>(?:[^'\n]|'\\''|'"'"'){{1,{_LONGEST}}})'|"(?P<double>[^"\n]{{1,{_LONGEST}}})")(?![^\s.,;:!?)])"""
    r"""|(?<!\S)(?P<plain>(?:\\.|[^\s\\])+)"""
)
_AFTER = ".,;:!?)"  # ends a sentence behind a path, which is no part of it
MAX_BYTES = 20_000_000  # the server takes no larger picture


@dataclass(frozen=True)
class Message:
    """``text``: the message, with file names in place of paths; empty where it was nothing else. ``missing``: paths of
    pictures that are not there, which stay in the text."""

    text: str
    pictures: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()


def read_message(text: str) -> Message:
    """Find the pictures that a message names by their paths."""
    if not any(ending in text.lower() for ending in _TYPES):
        return Message(text)
    pictures: list[Path] = []
    missing: list[str] = []
    rest: list[str] = []
    end = 0
    for match in _WORD.finditer(text):
        path = _path(match)
        if path is None:
            continue
        try:
            if not path.is_file():
                missing += [str(path)] if len(path.parts) > 1 else []
                continue
        except (OSError, ValueError):  # no name of a file
            continue
        pictures.append(path)
        rest += [text[end : match.start()], path.name]
        end = match.end() - len(_behind(match))
    if not any(piece.strip() for piece in (*rest[::2], text[end:])):
        return Message("" if pictures else text, tuple(pictures), tuple(missing))
    return Message("".join((*rest, text[end:])), tuple(pictures), tuple(missing))


def _path(word: re.Match[str]) -> Path | None:
    """The path that a word of a message is; None where it is no picture's."""
    if word["single"] is not None:
        written = re.sub(r"""'(?:\\'|"'")'""", "'", word["single"])
    elif word["double"] is not None:
        written = word["double"]
    else:
        written = re.sub(r"\\(.)", r"\1", word["plain"].removesuffix(_behind(word)))
    if written.startswith("file://"):
        written = unquote(urlsplit(written).path)
    if len(written) > _LONGEST or not written.lower().endswith(tuple(_TYPES)):
        return None
    try:
        return Path(written).expanduser()
    except RuntimeError:  # nobody's home
        return Path(written)


def _behind(word: re.Match[str]) -> str:
    """The text right behind an unquoted path."""
    plain = word["plain"] or ""
    return plain[len(plain.rstrip(_AFTER)) :]


def data_url(path: Path) -> str:
    """The picture as a data: address. Raises OctavoError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OctavoError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise OctavoError(f"{path} has more than {MAX_BYTES // 10**6} MB: scale the picture down")
    return f"data:image/{_TYPES[path.suffix.lower()]};base64,{b64encode(data).decode()}"
