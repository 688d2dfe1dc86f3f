"""Token ids to text, one step at a time: every token costs the same, however long the answer has become.

Nearly all tokenizers of language models are one of two kinds, and both map a token to bytes on its own:

* byte-level BPE (GPT-2's alphabet of printable stand-ins for bytes), and
* SentencePiece with byte fallback ("▁" for a space, ``<0xE6>`` for a byte; the text's first space is dropped).

So a table of token bytes and an incremental UTF-8 decoder give exactly the text of decoding all ids at once. Other
kinds (WordPiece, ...) fall back to decoding a short window of tokens twice and taking the difference.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_CONTEXT = 5  # prompt tokens that the window decoder starts from, so that a leading space is kept
_WINDOW_LIMIT = 16  # undecodable tokens after which the window decoder gives up waiting for the rest of a character


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in GPT-2's alphabet: printable Latin-1 stands for itself, the rest for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """Bytes and texts of a tokenizer's tokens; shared by all requests, filled as tokens turn up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = tokenizer.backend
        decoder = _decoder_spec(self.backend)
        self.kind = _decoder_kind(decoder)  # "byte_level" | "byte_fallback" | "other"
        # SentencePiece drops the space that it put before the first word.
        self.strips_leading_space = self.kind == "byte_fallback" and decoder[-1]["type"] == "Strip"
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self._alphabet = _byte_level_alphabet() if self.kind == "byte_level" else {}
        self._bytes: dict[int, bytes] = {}
        self._text: dict[int, str] = {}
        self._whole: dict[int, str | None] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; empty for an id that the tokenizer does not know."""
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._make_bytes(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """The token on its own as text, with U+FFFD where it holds a part of a character."""
        text = self._text.get(token_id)
        if text is None:
            text = self._text[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def whole_text(self, token_id: int) -> str | None:
        """The token's text where it stands for itself, None where it holds a part of a character."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        text: str | None
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    def _make_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        if self.kind == "byte_fallback":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


def _decoder_spec(backend: Any) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of its steps."""
    if backend.decoder is None:
        return []
    # The decoder's state is its JSON; the whole tokenizer's JSON would take seconds for a large vocabulary.
    spec = json.loads(backend.decoder.__getstate__())
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _decoder_kind(spec: list[dict[str, Any]]) -> str:
    types = [step["type"] for step in spec]
    if types == ["ByteLevel"]:
        return "byte_level"
    if types[:3] == ["Replace", "ByteFallback", "Fuse"]:
        replaces_space = spec[0].get("pattern") == {"String": "▁"} and spec[0].get("content") == " "
        rest = spec[3:]
        strips_one = rest == [] or rest == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        if replaces_space and strips_one:
            return "byte_fallback"
    return "other"


class _Decoder(Protocol):
    def decode(self, token_id: int) -> str:
        """Text that is certain once this token is known."""

    def flush(self) -> str:
        """Return the bytes held back for the rest of a character that never came."""


class _TableDecoder:
    """Token bytes through an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no part of a character is pending
        # The dropped space is the prompt's, unless the prompt shows no text at all.
        self._strip_space = vocabulary.strips_leading_space and all(t in self._skipped for t in prompt_token_ids)

    def decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._between and not self._strip_space:  # nearly always
            whole = self._vocabulary.whole_text(token_id)
            if whole is not None:
                return whole
        piece = self._vocabulary.token_bytes(token_id)
        if self._strip_space and piece:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        text = self._utf8.decode(piece)
        self._between = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDecoder:
    """For decoders that look at neighbours: decode the last few tokens with and without the new one."""

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._backend = vocabulary.backend
        self._skip = params.skip_special_tokens
        self._added = {} if params.spaces_between_special_tokens or self._skip else vocabulary.added_tokens
        self._window = list(prompt_token_ids[-_WINDOW_CONTEXT:])
        self._seen = len(self._window)  # tokens of the window whose text is out
        self._last_added = False

    def _text(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip)

    def decode(self, token_id: int) -> str:
        self._window.append(token_id)
        after_added, self._last_added = self._last_added, token_id in self._added
        if after_added and self._last_added:  # neighbours without the space that the decoder puts between tokens
            self._keep_from_last()
            return self._added[token_id]
        text = self._pending()
        if text.endswith(REPLACEMENT) and len(self._window) - self._seen < _WINDOW_LIMIT:
            return ""
        if text:
            self._keep_from_last()
        return text

    def _pending(self) -> str:
        before, now = self._text(self._window[: self._seen]), self._text(self._window)
        return now[len(before) :] if len(now) > len(before) else ""

    def _keep_from_last(self) -> None:
        self._window = self._window[self._seen :]
        self._seen = len(self._window)

    def flush(self) -> str:
        return self._pending()


def _new_decoder(vocabulary: Vocabulary, params: SamplingParams, prompt_token_ids: Sequence[int]) -> _Decoder:
    if vocabulary.kind == "other":
        return _WindowDecoder(vocabulary, params, prompt_token_ids)
    return _TableDecoder(vocabulary, params.skip_special_tokens, prompt_token_ids)


class TextOffsets:
    """Positions in a text, in characters, at which its tokens begin; the tokens may come in pieces. A token without
    text (a special one, the first bytes of a character) begins where the next one does."""

    def __init__(
        self, vocabulary: Vocabulary, params: SamplingParams, prompt_token_ids: Sequence[int], start: int
    ) -> None:
        """``start``: characters before the first token."""
        self._decoder = _new_decoder(vocabulary, params, prompt_token_ids)
        self._at = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offset of each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token_id))
        return offsets


def prompt_offsets(vocabulary: Vocabulary, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the positions in ``text`` at which the tokens of a prompt begin. Tokens that the tokenizer adds (BOS) are
    not in the text."""
    decoder = _new_decoder(vocabulary, SamplingParams(skip_special_tokens=False), ())
    offsets, at = [], 0
    for token_id in token_ids:
        offsets.append(at)
        piece = decoder.decode(token_id)
        if token_id not in vocabulary.special_ids or text.startswith(piece, at):
            at = min(at + len(piece), len(text))
    return offsets


class Detokenizer:
    """The growing text of one sequence and its stop strings.

    Text that may be the beginning of a stop string is held back until it is known not to be; nothing else is.
    """

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = _new_decoder(vocabulary, params, prompt_token_ids)
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._released: list[str] = []  # text that no stop string can take back
        self._held = ""  # the longest end of the text that a stop string begins with

    @property
    def text(self) -> str:
        """All text that is certain so far, or since the last `take_delta`."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def take_delta(self) -> str:
        """Text that became certain since the last call; it is forgotten."""
        new, self._released = self._released, []
        return new[0] if len(new) == 1 else "".join(new)

    def update(
        self, token_ids: Sequence[int], finished: bool, stopped_by_token: bool = False
    ) -> tuple[int, str | None]:
        """Take new tokens in. Returns how many of them belong to the answer, and the stop string that ended it.

        ``stopped_by_token``: the last id ended the sequence (EOS or a stop token) and shows no text unless
        ``include_stop_str_in_output``.
        """
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if stopped_by_token and count == len(token_ids) and not self._include_stop:
                break
            text = self._decoder.decode(token_id)
            if not text:
                continue
            if not self._stops:
                self._released.append(text)
                continue
            stop = self._search(text)
            if stop is not None:
                return count, stop
        if finished:
            self._release(self._held + self._decoder.flush())
            self._held = ""
        return len(token_ids), None

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)

    def _search(self, new: str) -> str | None:
        """The stop string that ends first in the held text plus ``new``; text that cannot be part of one is let go."""
        text = self._held + new
        if self._num_tokens > self._min_tokens:
            found: tuple[int, int, str] | None = None
            for stop in self._stops:
                # A match ends inside the new text: older ones were seen, or came before min_tokens.
                start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
                if start != -1 and (found is None or (start + len(stop), start) < found[:2]):
                    found = (start + len(stop), start, stop)
            if found is not None:
                end, start, stop = found
                self._release(text[: end if self._include_stop else start])
                self._held = ""
                return stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self._release(text[: len(text) - keep])
        return None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not the whole of it."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) != -1:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
