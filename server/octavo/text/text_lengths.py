"""Numbers of tokens of texts with which prompts begin."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

_MOST = 256  # texts

Tokenize = Callable[[str], list[int]]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two lists of tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TextLengths:
    """Counts them, and remembers: agents send the same beginnings again. May be used from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, text: str, ids: Sequence[int], tokenize: Tokenize, salt: str | None) -> int:
        """The number of the prompt's tokens ``ids`` that its beginning ``text`` surely has."""
        key = hashlib.sha256(f"{len(salt or '')} {salt} {text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            own = tokenize(text)
            known = len(own), own[-1] if own else -1
            with self._lock:
                self._known[key] = known
                if len(self._known) > _MOST:
                    self._known.popitem(last=False)
        length = min(known[0], len(ids))
        return length if not length or ids[length - 1] == known[1] else length - 1  # what follows has joined it
