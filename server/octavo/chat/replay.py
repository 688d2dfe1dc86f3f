"""Answers as they were spoken, so that the next turn's prompt is found in the cache to its last token. Pure.

Clients send answers back in words of their own: without spaces at the ends, with arguments written anew, without
thoughts. And a model spells a text in other tokens than its tokenizer would. So an answer is remembered with its
tokens. Where a prompt is the same as before up to an answer, and the template writes that answer with the same letters,
what was spoken stands in the prompt; thoughts that the client left out are put back before. An answer that is not
remembered costs a prefill, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.chat.answer import AnswerDelta
from octavo.text.messages import REASONING, object_of

MOST_ANSWERS, MOST_BYTES = 8192, 64 << 20
_TOKEN_BYTES = 36  # of an id in a list
_UNWRITTEN = "<|constrain|>"  # a mark that gpt-oss says, and its template does not write
_ALIKE = 8  # conversations in which the same answer is the same message

Messages = Sequence[dict[str, Any]]
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Spoken:
    """An answer: its text and tokens, the last one of which is special, and the prompt that it followed."""

    prompt: bytes  # digest
    length: int  # of the prompt, in characters
    text: str
    ids: list[int]
    thoughts: str
    end: str  # the text of the last token

    def letters(self, prompt: str) -> int:
        """The length of ``prompt`` up to the end of this answer, if it has that with the same letters; else 0."""
        at = self.length
        for _ in range(self.text.count(self.end)):
            at = prompt.find(self.end, at) + len(self.end)
            if at < len(self.end):
                return 0
        return at if _same_letters(prompt[self.length : at], self.text) else 0


def _same_letters(a: str, b: str) -> bool:
    """True if two texts are the same but for space, and for the order of what they say."""
    if a == b:
        return True
    a, b = ("".join(text.replace(_UNWRITTEN, "").split()) for text in (a, b))
    return a == b or (len(a) == len(b) and Counter(a) == Counter(b))


class SpokenAnswers:
    """The answers that were spoken last. May be used from several threads."""

    def __init__(self, most: int = MOST_ANSWERS, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._size = most, most_bytes, 0
        self._known: OrderedDict[tuple[bytes, bytes], Spoken] = OrderedDict()
        self._alike: dict[bytes, list[Spoken]] = {}
        self._lock = threading.Lock()

    def keep(self, key: bytes, spoken: Spoken) -> None:
        """Remember an answer."""
        with self._lock:
            self._drop(key, spoken.prompt)
            self._known[key, spoken.prompt] = spoken
            self._alike.setdefault(key, []).append(spoken)
            self._size += _size(spoken)
            if len(self._alike[key]) > _ALIKE:
                self._drop(key, self._alike[key][0].prompt)
            while self._known and (len(self._known) > self._most or self._size > self._most_bytes):
                self._drop(*next(iter(self._known)))

    def _drop(self, key: bytes, prompt: bytes) -> None:
        spoken = self._known.pop((key, prompt), None)
        if spoken is not None:
            self._size -= _size(spoken)
            self._alike[key].remove(spoken)
            if not self._alike[key]:
                del self._alike[key]

    def find(self, key: bytes) -> list[Spoken]:
        """The answers of a key, the last one first."""
        with self._lock:
            found = self._alike.get(key, [])[::-1]
            for spoken in found:
                self._known.move_to_end((key, spoken.prompt))
            return found

    def __len__(self) -> int:
        return len(self._known)


def _size(spoken: Spoken) -> int:
    return 2 * len(spoken.text) + _TOKEN_BYTES * len(spoken.ids) + len(spoken.thoughts) + 500


@dataclass(frozen=True)
class Replay:
    """The answers that one client may find again. ``scope``: whose, and of which cache; ``end_of``: the text of a
    special token, None for others."""

    answers: SpokenAnswers
    scope: str
    end_of: Callable[[int], str | None]
    decode: Callable[[Sequence[int]], str]

    def remember(self, prompt: str, at: int, answer: AnswerDelta, ids: list[int]) -> None:
        """Remember an answer, which is message number ``at`` of its conversation. ``ids`` are its tokens."""
        end = self.end_of(ids[-1]) if ids else None
        if end is None:
            return
        calls = [(call.name or "", object_of(call.arguments)) for call in answer.calls]
        key = self._key(at, answer.content, calls)
        digest = hashlib.sha256(_bytes(prompt)).digest()
        self.answers.keep(key, Spoken(digest, len(prompt), self.decode(ids), ids, answer.reasoning, end))

    def known(self, messages: Messages) -> dict[int, list[Spoken]]:
        """The answers that may have been spoken where the messages have some, by their numbers."""
        found = {}
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                functions = [call["function"] for call in message.get("tool_calls") or ()]
                calls = [(function["name"], function["arguments"]) for function in functions]
                if spoken := self.answers.find(self._key(at, message["content"], calls)):
                    found[at] = spoken
        return found

    def _key(self, at: int, content: str, calls: Sequence[tuple[str, Any]]) -> bytes:
        lines = [line.rstrip() for line in content.strip().splitlines()]
        said = json.dumps([self.scope, at, lines, calls], sort_keys=True, default=str)
        return hashlib.sha256(_bytes(said)).digest()


def with_thoughts(messages: Messages, known: Mapping[int, Sequence[Spoken]]) -> list[dict[str, Any]]:
    """The messages with the thoughts that were spoken, where the client has sent none."""
    found = list(messages)
    for at, spoken in known.items():
        if spoken[0].thoughts.strip() and not any(messages[at].get(name) for name in REASONING):
            found[at] = {**messages[at], **dict.fromkeys(REASONING, spoken[0].thoughts)}
    return found


@dataclass
class Replayed:
    """A prompt in which answers stand as they were spoken: ``text`` is what the template wrote."""

    text: str
    answers: list[tuple[int, int, Spoken]] = field(default_factory=list)  # from and to which character
    known: set[int] = field(default_factory=set)  # numbers of messages that may be answers which are remembered
    found: set[int] = field(default_factory=set)  # and of those that are

    def ids(self, tokenize: Tokenize, until: int | None = None) -> list[int] | None:
        """The tokens of the text, or of its first characters. None where the tokenizer joins an answer's end with what
        follows."""
        until = len(self.text) if until is None else until
        ids, at, before = list[int](), 0, None
        for start, end, spoken in self.answers:
            if end > until:
                break
            between = _behind(before, self.text[at:start], tokenize)
            if between is None:
                return None
            ids += between + spoken.ids
            at, before = end, spoken
        rest = _behind(before, self.text[at:until], tokenize)
        return None if rest is None else ids + rest

    def tokenizing(self, tokenize: Tokenize) -> Tokenize:
        """A function for the tokens of texts with which the prompt begins, and of others as ``tokenize`` does."""

        def tokens(text: str) -> list[int]:
            begins = self.answers and len(text) > self.answers[0][0] and self.text.startswith(text)
            ids = self.ids(tokenize, len(text)) if begins else None
            return tokenize(text) if ids is None else ids

        return tokens


def _behind(before: Spoken | None, text: str, tokenize: Tokenize) -> list[int] | None:
    """The tokens of a text behind an answer; None if they are not its own."""
    if before is None or not text:
        return tokenize(text)
    ids = tokenize(before.end + text)
    return ids[1:] if ids[:1] == before.ids[-1:] else None


def follow(text: str, known: Mapping[int, Sequence[Spoken]]) -> Replayed:
    """Find the answers that were spoken in the prompt ``text``, one behind the other."""
    replayed, digest, hashed, at = Replayed(text, known=set(known)), hashlib.sha256(), 0, 0
    for number in sorted(known):
        for spoken in known[number]:
            if not at <= spoken.length < len(text):
                continue
            longer = digest.copy()
            longer.update(_bytes(text[hashed : spoken.length]))
            if longer.digest() != spoken.prompt:
                continue
            digest, hashed = longer, spoken.length
            if end := spoken.letters(text):
                replayed.answers.append((spoken.length, end, spoken))
                replayed.found.add(number)
                at = end
            break
    return replayed


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
