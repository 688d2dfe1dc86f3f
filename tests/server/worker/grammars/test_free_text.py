"""A grammar is not asked about free text, and holds the calls in it as if it had been."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reciting import small_tokenizer

from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.free_answer import free_answer
from octavo.interface.step import SchedulerOutput
from octavo.worker.grammars.free_text import FreeText, Spelling
from octavo.worker.grammars.pool import GrammarPool
from octavo.worker.grammars.sequences import SequenceGrammars

WORDS = [b"<", b"<too", b"l>", b"tool>", b"a<", b"<<", b"<tool>", b"b", b"\xe2", b"\x8a\xb2x", b">", b"[CALL]", b""]
MARKS = ["<tool>", "⊲x"]
TEXTS = [
    "plain words and more",
    "3 < 4 and",
    "<tool_call>",
    '{"name": "read", "arguments": {"path": "x"}}',
    "</tool_call>",
]
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=24))
def test_the_grammar_is_asked_where_a_mark_has_begun_or_stands(said: list[int]) -> None:
    """Against the definition, on the whole text behind each token. "[CALL]" is a mark as a token."""
    free = FreeText(MARKS, [WORDS.index(b"[CALL]")], Spelling(WORDS))
    assert free.allow(b"\xff" * 2)
    woken: list[int] | None = None
    for at, token in enumerate(said):
        if woken is not None or token in free.wakers:
            woken = [*(woken or ()), token]
            woken = None if free.is_free(woken) else woken
        text = b"".join(WORDS[one] for one in said[: at + 1])
        marks = [mark.encode() for mark in MARKS]
        stands = any(mark in text for mark in marks) or WORDS.index(b"[CALL]") in said[: at + 1]
        begins = any(text.endswith(mark[:length]) for mark in marks for length in range(1, len(mark)))
        assert (woken is not None) == (stands or begins), text
        assert free.since_woken(said[: at + 1]) == (woken or [])


@given(st.lists(st.binary(max_size=5), max_size=30), st.binary(min_size=1, max_size=1))
def test_a_spelling_is_the_tokens(tokens: list[bytes], byte: bytes) -> None:
    spelling = Spelling(tokens)
    assert [spelling[number] for number in range(len(tokens))] == tokens
    assert spelling.with_byte(byte) == {number for number, token in enumerate(tokens) if byte in token}


def test_a_grammar_that_forbids_a_part_of_a_mark_is_asked_of_all() -> None:
    words = [b"<", b"<tool>", b"<tool>x", b"\x99<", b"<|special|>"]
    for forbidden, may in (([4], True), ([2], False), ([3], False), ([], True)):
        free = FreeText(["<tool>"], [], Spelling(words))
        mask = sum(1 << token for token in range(len(words)) if token not in forbidden)
        assert free.allow(bytes([mask])) == may
        assert 4 not in free.wakers if forbidden == [4] else 4 in free.wakers


def step_of(guessed: list[int]) -> SchedulerOutput:
    step = SchedulerOutput(1, total_num_scheduled_tokens=1 + len(guessed))
    step.num_scheduled_tokens["a"] = 1 + len(guessed)
    step.scheduled_spec_decode_tokens["a"] = guessed
    return step


class Held:
    """A sequence of the grammar of strict calls, on the real processes."""

    def __init__(self, folder: Path, lets_be: bool = True) -> None:
        backend = small_tokenizer(TEXTS, ("<|im_end|>",), ("a<b",))
        path = folder / "tokenizer.json"
        backend.save(str(path))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        self.backend, self.size = backend, backend.get_vocab_size(True)
        config = SimpleNamespace(files=SimpleNamespace(tokenizer_path=folder), vocab_size=self.size)
        self.end = backend.token_to_id("<|im_end|>")
        self.pool = GrammarPool(config, 2, num_drafts=8)  # type: ignore[arg-type]
        self.pool.lets_be = lets_be
        self.grammars = SequenceGrammars(self.pool, self.size)
        row = TOOL_FORMATS["hermes"]
        functions = [{"name": "read", "parameters": PATH, "strict": True}]
        free = free_answer(row, functions, None, backend.token_to_id, True)
        assert free is not None
        self.grammar = free.grammar((), None, backend.token_to_id)
        future = self.pool.prepare(self.grammar)
        until = time.monotonic() + 60
        while not future.done() and time.monotonic() < until:
            self.pool.poll(0.1)
        future.result(0)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return found

    def say(self, text: str, name: str = "a") -> None:
        """Say a text token by token, each allowed by the mask where there is one."""
        for token in self.ids(text):
            mask = self.grammars.start_fill([name], {})()
            assert mask is None or mask[0, token // 32] >> (token % 32) & 1, (text, self.backend.decode([token]))
            assert not self.grammars.accept({name: [token]})

    def mask(self, name: str = "a") -> np.ndarray | None:
        mask = self.grammars.start_fill([name], {})()
        return None if mask is None else mask[0].numpy()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(tmp_path_factory.mktemp("asked"), lets_be=False)


def settled(held: Held) -> bool:
    """True if no mask is asked for, once the grammar has answered to the last token."""
    held.mask()
    held.pool.poll(0.0)
    return not held.grammars.hold and held.mask() is None


def test_no_mask_is_asked_for_in_free_text(held: Held) -> None:
    held.grammars.add("a", held.grammar, [])
    try:
        assert settled(held)
        held.say("plain words and more")
        assert settled(held), "nothing has begun"
        held.say("3 <")
        assert held.grammars.hold and held.mask() is not None, "a call may have begun"
        held.say(" 4 and")
        assert settled(held), "it was none"
        held.say('<tool_call>{"name": "')
        (other,) = held.ids("x")[:1]
        (right,) = held.ids("read")[:1]
        mask = held.mask()
        assert mask is not None and mask[right // 32] >> (right % 32) & 1 and not mask[other // 32] >> (other % 32) & 1
        held.say('read", "arguments": {"path": "x"}}</tool_call>')
        held.say(" plain")
    finally:
        held.grammars.remove("a")


def test_a_sequence_goes_on_behind_what_it_has_said(held: Held) -> None:
    """As after a preemption: behind free text it is free, behind a call that has begun it is held."""
    for name, said, is_free in (("free", "plain words", True), ("held", 'more <tool_call>{"name": "', False)):
        held.grammars.add(name, held.grammar, held.ids(said))
        mask = held.mask(name)
        assert (mask is None) == is_free
        if mask is not None:
            (other,) = held.ids("x")[:1]
            assert not mask[other // 32] >> (other % 32) & 1
        held.grammars.remove(name)


def test_guesses_in_free_text_end_where_a_call_may_begin(held: Held) -> None:
    held.grammars.add("a", held.grammar, [])
    try:
        for text, kept in (("plain words", "plain words"), ("plain <tool_call>", "plain"), ("<tool_call>", "")):
            guessed = held.ids(text)
            step = step_of(guessed)
            held.grammars.cut(step)
            wanted = guessed[: len(held.ids(kept))] if kept else []
            assert step.scheduled_spec_decode_tokens.get("a", []) == wanted
            assert step.num_scheduled_tokens["a"] == step.total_num_scheduled_tokens == 1 + len(wanted)
            assert held.grammars.start_fill(["a"], step.scheduled_spec_decode_tokens)() is None
            after = held.grammars.draft_mask(["a"], 1)
            assert after is None or (after == -1).all()
    finally:
        held.grammars.remove("a")


def test_guesses_are_held_where_a_text_becomes_free_meanwhile(held: Held) -> None:
    """The answer that the text is free again may come while the guesses of the next step are looked at."""
    (mark,) = {*held.ids("<")}
    call = held.ids('<tool_call>{"name": "read')
    for _ in range(5):
        held.grammars.add("a", held.grammar, [])
        held.say("3 <")
        held.mask()
        held.grammars.accept({"a": held.ids(" 4")[:1]})
        guessed = [*held.ids(" and"), *call]
        step = step_of(guessed)
        held.grammars.cut(step)
        kept = step.scheduled_spec_decode_tokens.get("a", [])
        held.grammars.start_fill(["a"], step.scheduled_spec_decode_tokens)()
        if mark in kept:
            after = held.grammars.draft_mask(["a"], len(kept))
            assert after is not None and not (after == -1).all()
        held.grammars.remove("a")


def test_all_texts_are_followed_where_others_wait_for_the_masks(tmp_path: Path) -> None:
    """Also characters that are cut into tokens."""
    held = Held(tmp_path, lets_be=False)
    held.grammars.add("a", held.grammar, [])
    for text in ("plain 🙂🙃 and 3 <", " 4 🙂", '<tool_call>{"name": "read'):
        held.say(text)
        assert held.mask() is not None
    (other,) = held.ids("x")[:1]
    mask = held.mask()
    assert mask is not None and not mask[other // 32] >> (other % 32) & 1
    held.grammars.remove("a")


def test_what_is_no_text_may_stand_in_free_text(held: Held) -> None:
    """A sequence that goes on behind it is as it was."""
    (end,) = held.ids("x") and [held.backend.token_to_id("<|im_end|>")]
    held.grammars.add("a", held.grammar, [*held.ids("plain 🙂")[:-1], end, *held.ids(" 3 < 4")])
    assert settled(held)
    held.grammars.remove("a")


def test_a_token_that_wakes_in_vain_leaves_all_allowed(tmp_path: Path) -> None:
    """The step behind it may wait for its mask, in a slot that has had none."""
    held = Held(tmp_path)
    held.grammars.add("a", held.grammar, [])
    for _ in range(3):
        held.say("a<b")
        mask = held.mask()
        assert mask is None or (mask != 0).any()
    assert settled(held)
    held.grammars.remove("a")


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_those_of_a_grammar_that_is_asked_of_all(held: Held, asked: Held, seed: int) -> None:
    """On random walks: where there is a mask, it is the same, and where there is none, it would let pass what it lets
    pass at the start."""
    rng = random.Random(seed)
    for one in (held, asked):
        one.grammars.add("walk", one.grammar, [])
    first = asked.mask("walk")
    assert first is not None
    likely = [token for text in ("<tool_call>", "a<b", "3 < 4", '{"name": "read') for token in held.ids(text)]
    characters = [t for t in range(held.size) if "\ufffd" not in held.backend.decode([t], skip_special_tokens=False)]
    history = list[str]()
    for _ in range(60):
        mask, whole = held.mask("walk"), asked.mask("walk")
        assert whole is not None
        if mask is None:
            assert ((whole & first) == first).all()
        else:
            differ = [
                held.backend.decode([t], skip_special_tokens=False)
                for t in range(held.size)
                if (mask[t // 32] ^ whole[t // 32]) >> (t % 32) & 1
            ]
            assert (mask == whole).all(), (history, differ)
        allowed = [token for token in characters if whole[token // 32] >> (token % 32) & 1]
        chosen = [token for token in likely if token in allowed] if rng.random() < 0.7 else allowed
        said = {"walk": [rng.choice(chosen or allowed)]}
        history.append(held.backend.id_to_token(said["walk"][0]))
        if said["walk"][0] == held.end:
            break
        assert not held.grammars.accept(said) and not asked.grammars.accept(said)
    for one in (held, asked):
        one.grammars.remove("walk")
