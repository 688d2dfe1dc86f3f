"""Grammars of answers that are free but for their calls, which begin with the model's own mark. Pure.

Where that mark is a token of the vocabulary, the grammar lets every other token pass, and costs next to nothing before
a call. Where it is text, the grammar reads the answer for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.chat.structured import MARKS, CallGrammar, TokenId, joined, with_tokens
from octavo.chat.tools.formats.row import Format, Harmony
from octavo.chat.tools.grammars import Functions, call_grammar

_HARMONY = """start: message (end_of_message message)*
end_of_message: {<|end|>} {<|start|>} "assistant"
message: {<|channel|>} ("analysis" | "commentary" | "final" (" "? {<|constrain|>} "json")?) {<|message|>} said | held
said: /(.|\\n)*/
"""


@dataclass(frozen=True)
class FreeAnswer:
    """The grammar of calls, and what must not stand in the text around them."""

    calls: CallGrammar
    tokens: tuple[int, ...] = ()  # with which calls begin
    texts: tuple[str, ...] = ()  # with which they begin, or seem to
    harmony: bool = False

    def grammar(self, marks: Iterable[str], max_calls: int | None, token_id: TokenId) -> str:
        """The grammar of the whole answer. ``marks``: further texts that may be tokens of it."""
        rule = with_tokens(self.calls.rule, token_id)
        if self.harmony:
            rules = with_tokens(f"{_HARMONY}held: {self.calls.rule}\n{self.calls.rules}", token_id)
            return joined(rules, self.calls.parts)
        more = "?" if max_calls == 1 else "*"
        start = f"start: free (({rule}) free){more}\n{self._free(marks, token_id)}\n{self.calls.rules}\n"
        return joined(start, self.calls.parts, {"texts": self.texts, "tokens": self.tokens})

    def _free(self, marks: Iterable[str], token_id: TokenId) -> str:
        if not self.texts:
            return f"free: other*\nother: <[^{','.join(map(str, self.tokens))}]>"
        known = {token_id(mark) for text in marks for mark in MARKS.findall(text)}
        ids = sorted(known - {None, *self.tokens})  # type: ignore[type-var]
        first = re.escape(self.texts[0][0])
        begun = "|".join(_pattern(text) for text in self.texts)
        spans = f"(({' | '.join(f'<[{number}]>' for number in ids)}) PLAIN? BEGUN*)*" if ids else ""
        # No text follows on one that has begun like a call, or the two could be a call's beginning.
        return f"free: PLAIN? BEGUN* {spans}\nPLAIN: /[^{first}]+/\nBEGUN: /{first}[^{first}]*/ & ~/({begun})(.|\\n)*/"


def free_answer(
    row: Format, functions: Functions, max_calls: int | None, token_id: TokenId, closes: bool
) -> FreeAnswer | None:
    """The grammar of an answer in which calls of ``functions`` hold their parameters. None: calls of this format have
    no mark by which they are known. Raises FieldError. ``closes``: as ``strict`` of `to_grammar`."""
    row = replace(row, gaps=None)  # a free model may write others than its template: its answer is kept as it was said
    if isinstance(row.arguments, Harmony):
        if token_id("<|channel|>") is None:
            return None
        return FreeAnswer(call_grammar(row, functions, max_calls, token_id, closes), harmony=True)
    mark = row.around[0] or row.call
    if not mark or row.begun or row.addressed or row.begins or mark[0].isalpha():  # a word may stand in any text
        return None
    tokens, texts, spelled = [], [], []
    for text in (mark, *row.also):
        at, number = _first_token(text, token_id)
        if number is None:
            texts.append(text)
            continue
        tokens.append(number)
        spelled.append(text[at:])
        if text == mark:
            row = _beginning_with(row, text[at:])
    if texts:  # a token that is not special is text, too
        texts += spelled
    others = {token_id(part) for text in row.marks for part in MARKS.findall(text)}
    if others & {*tokens} or len({text[0] for text in texts}) > 1 or any(text[0] in text[1:] for text in texts):
        return None
    calls = call_grammar(row, functions, max_calls, token_id, closes)
    return FreeAnswer(calls, tuple(tokens), tuple(texts))


def _first_token(text: str, token_id: TokenId) -> tuple[int, int | None]:
    """The place and the id of the first mark in a text that is a token."""
    for found in MARKS.finditer(text):
        if (number := token_id(found[0])) is not None:
            return found.start(), number
    return 0, None


def _beginning_with(row: Format, mark: str) -> Format:
    """The row without the text in front of its first token: whatever text precedes that is free."""
    if row.around[0]:
        return replace(row, section=(mark, row.section[1]))
    return replace(row, call=mark)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n").replace("\\ ", " ")
