"""The harmony format of gpt-oss: an answer is several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    ...<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

Thoughts are on the channel `analysis`, calls have a function as recipient, all else is content. The prompt ends with
``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from octavo.chat.tools.parsers.core import Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.reader import CutOffError, NotACallError, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_FUNCTION = "functions."
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_PEOPLE = ("assistant", "user", "all", "commentary")  # recipients that are no tools
_SEPARATOR = "\n"  # between messages that become one text


class HarmonyParser(ToolParser):
    """``calls`` False: no tools were offered, so that messages to functions are content. ``continues``: the prompt ends
    inside an answer, whose text goes on. Text without a header is content."""

    def __init__(self, names: Collection[str] = (), calls: bool = True, continues: bool = False) -> None:
        super().__init__(names)
        self._calls, self._continues = calls, continues
        self._parts: set[type] = set()  # kinds of text that were given out
        self._separator = ""

    def _run(self) -> Steps[None]:
        try:
            while (yield from self._peek()):
                yield from self._message()
        except CutOffError:
            return

    def _parse(self) -> Steps[None]:  # `_run` is all of it
        yield from ()

    def _message(self) -> Steps[None]:
        header = ""
        if self._continues:
            self._continues = False
        elif (yield from self._begins_header()):
            pieces: list[str] = []
            marker = yield from self._until((MESSAGE, END, RETURN, CALL), pieces.append)
            header = "".join(pieces)
            if marker != MESSAGE:
                self._give_cut_header(header)
                return
        channels, recipient = _CHANNEL.findall(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        if to.startswith(_FUNCTION) and self._calls:
            yield from self._call(to.removeprefix(_FUNCTION))
            return
        is_tool = bool(to) and to not in _PEOPLE and not to.startswith(_FUNCTION)  # the model's own tools
        kind = Reasoning if is_tool or (channels[-1:] == ["analysis"]) else str
        self._separator = _SEPARATOR if kind in self._parts else ""
        yield from self._until(
            (END, RETURN, CALL, START), self._give_reasoning if kind is Reasoning else self._give_content
        )

    def _begins_header(self) -> Steps[bool]:
        for marker in (CHANNEL, START, MESSAGE, CONSTRAIN, " to="):
            ahead = self._text[self._at : self._at + len(marker)]
            while marker.startswith(ahead) and ahead != marker and not self._ended:
                yield
                ahead = self._text[self._at : self._at + len(marker)]
            if ahead == marker:
                return True
        return False

    def _until(self, markers: tuple[str, ...], out: Callable[[str], None]) -> Steps[str]:
        """Hand on the text up to the next marker, which is read and returned; "" at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text, self._at)
            held = 0 if self._ended else max(overlap(self._text, marker) for marker in markers)
            end = max(self._at, len(self._text) - held) if found is None else found.start()
            text, self._at, self._settled = self._text[self._at : end], end, end
            if text:
                out(text)
            if found is not None:
                self._at = self._settled = found.end()
                if found.group() == START:  # the header of the next message
                    self._at = self._settled = found.start()
                return found.group()
            if self._ended:
                return ""
            yield

    def _give_content(self, text: str) -> None:
        self._parts.add(str)
        self._give(self._separator + text)
        self._separator = ""

    def _give_reasoning(self, text: str) -> None:
        self._parts.add(Reasoning)
        self._give(Reasoning(self._separator + text))
        self._separator = ""

    def _give_cut_header(self, header: str) -> None:
        """A header without its message: of a call that was cut off, its name is known, or the beginning of it."""
        recipient = _RECIPIENT.search(header)
        if self._calls and self._ended and recipient and recipient[1].startswith(_FUNCTION):
            self.ends_inside_call = True
            if name := self._completed(recipient[1].removeprefix(_FUNCTION)):
                self._start_call(name)

    def _call(self, name: str) -> Steps[None]:
        self._start_call(name)
        self._in_arguments = True
        try:
            following = yield from self._skip_space()
            self._settled = self._at
            if following == "{":
                yield from self._json_value(self._give_arguments)
            elif not following or (yield from self._starts_with_any(END, CALL, RETURN)):
                self._give_arguments("{}")
            else:
                raise NotACallError
            yield from self._until((END, RETURN, CALL, START), lambda text: None)
        except CutOffError:
            self._give_cut_call()
            raise
        except NotACallError:  # not JSON: the client sees what the model wrote
            self._at = self._settled
            yield from self._until((END, RETURN, CALL, START), self._give_arguments)
        self._in_arguments = False

    def _starts_with_any(self, *literals: str) -> Steps[bool]:
        for literal in literals:
            if (yield from self._starts_with(literal)):
                return True
        return False
