"""Cache of tokenised prefixes: the beginning that prompts share is tokenised once.

System prompts, documents and growing conversations are in the KV prefix cache; tokenising them again would then take
longer than everything else before the model runs. Token ids may be joined only where the tokenizer always splits:
`_cuts_at_spaces` says for which tokenizers a space after a letter is such a place.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.text import split_patterns

if TYPE_CHECKING:
    from tokenizers import AddedToken

    from octavo.text.tokenizer import Tokenizer

MIN_CHARS = 256  # shorter texts are tokenised faster than looked up
MAX_PREFIXES, MAX_SIZE = 64, 1 << 20  # number of prefixes; characters and tokens of all of them
_RECENT, _RECENT_CHARS = 8, 1 << 17  # texts that the next one is compared with, and how much of each
_LOOK_BACK = 4096  # characters in which a cut is looked for
_UNICODE = frozenset({"NFC", "NFD", "NFKC", "NFKD"})  # a space neither composes with its neighbours nor parts them


class PrefixTokens:
    """Encodes as ``tokenizer.encode`` does, token by token. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, min_chars: int = MIN_CHARS) -> None:
        self._tokenizer = tokenizer
        self._min_chars = min_chars
        # A prefix and the space after it -> the prefix's tokens; least recently used first.
        self._prefixes: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()
        self._around = _around(tokenizer) if _cuts_at_spaces(tokenizer) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, as ``tokenizer.encode`` gives them."""
        if self._around is None or len(text) < self._min_chars:
            return self._tokenizer.encode(text, add_special_tokens)
        with self._lock:
            known = self._find(text)
            ids = self._prefixes[known] if known else []
            if known:
                self._prefixes.move_to_end(known)
            recent = list(self._recent)
            self._recent.append(text[:_RECENT_CHARS])
        start = max(0, len(known) - 1)
        shared = max((_common(text, other, self._min_chars) for other in recent), default=0)
        cut = _last_cut(text, start + self._min_chars, shared)
        if cut:
            ids = ids + self._tokenizer.encode(text[start:cut], add_special_tokens=False)
            self._keep(text[: cut + 1], ids)
            start = cut
        before, after = self._around if add_special_tokens else ([], [])
        return before + ids + self._tokenizer.encode(text[start:], add_special_tokens=False) + after

    def num_new_chars(self, text: str) -> int:
        """Number of characters that are not in a known prefix."""
        with self._lock:
            return len(text) - max(0, len(self._find(text)) - 1)

    def _find(self, text: str) -> str:
        """The longest known prefix of ``text``."""
        return max(filter(text.startswith, self._prefixes), key=len, default="")

    def _keep(self, prefix: str, ids: list[int]) -> None:
        with self._lock:
            if prefix not in self._prefixes:
                self._prefixes[prefix] = ids
                self._size += len(prefix) + len(ids)
            while self._size > MAX_SIZE or len(self._prefixes) > MAX_PREFIXES:
                oldest, its_ids = self._prefixes.popitem(last=False)
                self._size -= len(oldest) + len(its_ids)


def _common(a: str, b: str, least: int) -> int:
    """Return the length of the common prefix of two texts, in characters; 0 if it is shorter than ``least``."""
    if a[:least] != b[:least]:
        return 0
    low, high = min(least, len(a), len(b)), min(len(a), len(b))  # the first `low` are equal
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _last_cut(text: str, least: int, end: int) -> int:
    """Return the position of the last space after a letter in ``text[:end]``; 0 if it is before ``least`` or too far
    back."""
    at, least = end, max(least, end - _LOOK_BACK)
    while (at := text.rfind(" ", least, max(least, at))) > 0:
        if text[at - 1].isalpha():
            return at
    return 0


def _state(part: Any) -> dict[str, Any]:
    """Return tokenizer.json's description of a part of a tokenizer."""
    return {} if part is None else json.loads(part.__getstate__())


def _parts(state: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return state[name] if state.get("type") == "Sequence" else [state] if state else []


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of ``a + b`` are those of ``a`` and those of ``b`` whenever ``a`` ends with a letter
    and ``b`` begins with a space."""
    backend = tokenizer.backend
    if type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return False
    if any(part["type"] not in _UNICODE for part in _parts(_state(backend.normalizer), "normalizers")):
        return False
    if any(map(_may_cross, backend.get_added_tokens_decoder().values())):
        return False
    words = as_bytes = False
    for part in _parts(_state(backend.pre_tokenizer), "pretokenizers"):
        if as_bytes:  # spaces are no spaces any more
            return False
        if part["type"] == "ByteLevel":
            words |= part["use_regex"]  # GPT-2's pattern, which cuts there too
            as_bytes = True
        elif part["type"] == "Split":
            isolated = part["behavior"] == "Isolated" and not part["invert"]
            if not isolated or part["pattern"].get("Regex") not in split_patterns.KNOWN:
                return False
            words = True
        elif part["type"] != "Digits":
            return False
    return words and as_bytes


def _may_cross(token: AddedToken) -> bool:
    """Return whether an added token could span a cut, or match on one side of it and not in the whole text."""
    content = str(token.content)
    spaced = not content.isspace() and any(map(str.isspace, content))
    changed = token.normalized and not content.isascii()  # into what, another part decides
    return spaced or changed or (token.rstrip and content[-1].isalpha()) or (token.single_word and content[0].isspace())


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and behind a text; None when that cannot be told."""
    inner = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    places = [i for i in range(len(whole)) if whole[i : i + len(inner)] == inner]
    return (whole[: places[0]], whole[places[0] + len(inner) :]) if inner and len(places) == 1 else None
