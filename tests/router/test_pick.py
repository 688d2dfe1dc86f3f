"""The picker's choice, without Envoy."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from typing import Any

import pytest
from benchmarks.routing.simulate import FRONTS, figures
from benchmarks.routing.workload import WORKLOADS
from hypothesis import example, given
from hypothesis import strategies as st
from support import cpu_time

from octavo_router.blocks import BLOCK_BYTES, CONTINUES, MAX_BLOCKS, MAX_TEXT, Prompt
from octavo_router.pick import ALTERNATIVES, LIVE_SECONDS, SESSION, SHORT, SPILL_FLOOR, Pick, Picker
from octavo_router.prompt import IMAGE_BLOCKS, read_prompt


def body(*said: str, **fields: str) -> bytes:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    return json.dumps({"model": "m", "messages": turns, **fields}).encode()


def picker(*names: str) -> Picker:
    made = Picker()
    made.set_replicas(names or ("a", "b", "c", "d"))
    return made


def of_blocks(blocks: list[int]) -> Prompt:
    return Prompt(blocks, blocks[max(0, math.ceil(CONTINUES * len(blocks)) - 1) :])


def pick(on: Picker, key: str, prompt: list[int] | Prompt, now: float = 0.0) -> Pick:
    found = on.pick(key, prompt if isinstance(prompt, Prompt) else of_blocks(prompt), now)
    assert found is not None
    return found


@given(st.integers(0, 400), st.integers(BLOCK_BYTES, 2000), st.integers(0, 12))
def test_a_second_turn_follows_the_first_however_short_that_was(asked: int, answered: int, others: int) -> None:
    made = picker()
    first = pick(made, "ours", read_prompt(body("q" * asked)))
    for i in range(others):  # so that its home may be somewhere else now
        pick(made, f"other {i}", read_prompt(body(f"{i} " * 200)))
    second = pick(made, "ours", read_prompt(body("q" * asked, "a" * answered, "and then?")))
    assert second.order[0] == first.order[0]


@given(st.integers(2, 12), st.integers(0, 1200), st.integers(2 * BLOCK_BYTES, 6 * BLOCK_BYTES))
def test_conversations_with_the_same_beginning_are_spread_and_then_stay(many: int, asked: int, said: int) -> None:
    """As many begin as one replica may serve at once, so that none is spilled."""
    made, opening = picker(), "q" * asked
    opened = [pick(made, "same", read_prompt(body(opening))) for _ in range(many)]
    assert max(Counter(one.order[0] for one in opened).values()) <= math.ceil(1.1 * many / 4) + 1
    for one in opened:
        made.end(one)
    turns = [[opening, f"{i} {'a' * said}", "and then?"] for i in range(many)]
    where = []
    for turn in turns:
        where.append(pick(made, "same", read_prompt(body(*turn))))
        made.end(where[-1])
    counts = Counter(one.order[0] for one in where)
    assert max(counts.values()) <= math.ceil(1.1 * many / 4) + 1
    for i, turn in enumerate(turns):
        again = pick(made, "same", read_prompt(body(*turn, "b" * said, "and then?")))
        made.end(again)
        assert again.order[0] == where[i].order[0]


def test_questions_too_short_for_a_cache_are_spread_while_some_run() -> None:
    made = picker()
    under_way = [pick(made, "hi", read_prompt(body("hi"))) for _ in range(8)]
    assert max(Counter(one.order[0] for one in under_way).values()) <= 3
    for one in under_way:
        made.end(one)
    assert len({pick(picker(), "hi", []).order[0] for _ in range(3)}) == 1, "routers agree on its home"


REQUEST = st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans())
STEPS = st.lists(REQUEST | st.sets(st.sampled_from("abcde")), max_size=40)


@given(STEPS)
def test_any_sequence_of_requests_gives_an_order_of_replicas_and_right_counts(steps: list[object]) -> None:
    made, there, under_way = Picker(), set[str](), list[Pick]()
    for now, step in enumerate(steps):
        if isinstance(step, set):
            there = step
            made.set_replicas(there)
            # Requests at replicas that are gone end there, and count nowhere else.
            under_way = [one for one in under_way if one.order[0] in there]
        else:
            conversation, length, ends = step  # type: ignore[misc]
            prompt = [hash((conversation, i)) for i in range(length)]
            found = made.pick(str(conversation), of_blocks(prompt), now * 100.0)
            assert (found is None) == (not there)
            if found:
                assert set(found.order) <= there
                assert len(found.order) == len(set(found.order)) == min(len(there), 1 + ALTERNATIVES)
                assert 0 <= found.matched <= 1
                under_way.append(found)
            if ends and under_way:
                made.end(under_way.pop())
        counted = Counter(one.order[0] for one in under_way)
        assert made.in_flight == {name: counted[name] for name in there}


def test_routers_that_know_nothing_of_each_other_agree_and_a_lost_replica_moves_only_its_own() -> None:
    def homes(*names: str) -> dict[str, str]:
        found = {}
        for number in range(200):  # each in a router of its own
            found[str(number)] = pick(picker(*names), str(number), [number]).order[0]
        return found

    before, after = homes("a", "b", "c", "d"), homes("d", "c", "b")
    assert {before[key] for key in before if before[key] != after[key]} == {"a"}
    assert min(Counter(before.values()).values()) > 30


def test_a_conversation_stays_and_a_full_replica_spills() -> None:
    made = picker()
    first = pick(made, "k", [1, 2, 3])
    second = pick(made, "k", [1, 2, 3, 4, 5])
    assert (second.order[0], second.reason) == (first.order[0], "conversation")
    assert second.matched == 3 / 5
    later = [pick(made, "k", [1, 2, 3, 4, 5, 6]) for _ in range(SPILL_FLOOR)]
    assert [one.reason for one in later] == ["conversation"] * (SPILL_FLOOR - 2) + ["spill", "conversation"]
    assert later[-3].order[0] == first.order[0] != later[-2].order[0] == later[-1].order[0], "it moves on"


def test_a_named_session_stays_whatever_it_asks_and_another_does_not_follow() -> None:
    made = picker()
    first = pick(made, f"{SESSION}1", [1, 2, 3])
    others = [pick(made, f"{SESSION}{number}", [1, 2, 3], number) for number in range(2, 10)]
    assert {one.order[0] for one in others} == {"a", "b", "c", "d"}, "one prompt, and sessions of their own"
    for number, prompt in enumerate(([7, 8, 9], [], [4])):
        again = pick(made, f"{SESSION}1", prompt, 20 + number)
        assert (again.order[0], again.reason) == (first.order[0], "conversation")


@given(st.floats(1.1, 10), st.integers(2, 6), st.integers(0, 200))
def test_the_load_factor_bounds_what_one_replica_gets(factor: float, replicas: int, many: int) -> None:
    """All requests are of one session."""
    made = picker(*"abcdef"[:replicas])
    made.load_factor = factor
    for now in range(many):
        pick(made, f"{SESSION}1", [1], now)
        mean = (now + 1) / replicas
        assert max(made.in_flight.values()) <= max(math.ceil(factor * mean), SPILL_FLOOR)


def test_a_replica_that_went_away_is_forgotten() -> None:
    made = picker("a")
    pick(made, "k", [1, 2, 3])
    made.set_replicas([])
    assert made.pick("k", of_blocks([1, 2, 3]), 1) is None
    made.set_replicas(["a"])
    again = pick(made, "k", [1, 2, 3], 2)
    assert (again.matched, again.reason, made.in_flight) == (0, "home", {"a": 1})


def test_conversations_that_are_over_do_not_count() -> None:
    """All new ones have one key: the first has its home, until that has its share."""
    made = picker("a", "b")
    homes = [pick(made, "k", list(range(number, number + SHORT)), 0).order[0] for number in range(0, 800, 100)]
    assert max(Counter(homes).values()) <= 5
    late = LIVE_SECONDS + 1
    assert pick(made, "k", [-1], late).order[0] == homes[0], "its share is free again"


CASES = [
    ("sessions", "1 router", 0.97),
    ("sessions", "2 routers", 0.93),
    ("hot", "1 router", 0.97),
    ("sessions, saturated", "1 router", 0.97),
    ("hot, saturated", "1 router", 0.97),
]


@pytest.mark.parametrize(("workload", "routers", "least"), CASES)
def test_hits_are_near_an_endless_caches_and_the_load_is_even(workload: str, routers: str, least: float) -> None:
    """Four replicas with caches of 40 % of all that is said, simulated."""
    best, found = (figures(WORKLOADS[workload], made, range(1, 4)) for made in (None, FRONTS[routers]))
    assert found["hit"] >= least * best["hit"]
    assert found["balance"] <= 1.25


def test_a_simulation_gives_the_same_figures_each_time() -> None:
    made = [figures(WORKLOADS["sessions, saturated"], FRONTS["2 routers"], range(5, 6)) for _ in range(2)]
    assert made[0] == made[1]


@given(st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=6))
def test_a_turn_begins_with_all_blocks_of_the_turn_before(said: list[str]) -> None:
    shorter, longer = read_prompt(body(*said)).blocks, read_prompt(body(*said, "and more " * 40)).blocks
    assert longer[: len(shorter)] == shorter
    assert len(longer) > len(shorter)
    assert not set(read_prompt(body(*said, cache_salt="tenant")).blocks) & set(longer)


NAMES = st.sampled_from(["messages", "prompt", "input", "content", "tools", "role", "text", "type", "image_url"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(), lambda one: st.lists(one, max_size=3) | st.dictionaries(NAMES, one)
)


@given(st.binary(max_size=300) | VALUES.map(lambda one: json.dumps(one).encode()))
def test_no_body_fails(junk: bytes) -> None:
    assert len(read_prompt(junk).blocks) <= len(junk) // BLOCK_BYTES + 8


def openai(image: str, text: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def responses(image: str, text: str) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": text}]
    return {"input": [{"role": "user", "content": parts}]}


def anthropic(image: str, text: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": image}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def ollama(image: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text, "images": [image]}]}


def ollama_once(image: str, text: str) -> dict[str, Any]:
    return {"prompt": text, "images": [image]}


@pytest.mark.parametrize("dialect", [openai, responses, anthropic, ollama, ollama_once])
@pytest.mark.parametrize("size", [40, 10**6])
def test_an_image_is_as_much_of_a_prompt_whatever_its_size_and_nobody_elses(dialect: Any, size: int) -> None:
    """What follows it counts, too: a conversation about a large image goes on where it was."""

    def read(image: str, text: str) -> Prompt:
        return read_prompt(json.dumps(dialect(image, text)).encode())

    mine, question = "data:image/png;base64," + "i" * size, "What is this? " * 20
    asked, longer = read(mine, question), read(mine, question + "And who made it? " * 20)
    assert IMAGE_BLOCKS < len(asked.blocks) < IMAGE_BLOCKS + 8
    assert longer.blocks[: len(asked.blocks)] == asked.blocks and longer.text != asked.text
    assert not set(read(mine[:-1] + "j", question).blocks) & set(asked.blocks)
    assert read(mine, question) == asked


def test_prompts_of_every_dialect_have_blocks_and_their_number_is_bounded() -> None:
    long = "x" * 1000
    for sent in (
        f'{{"prompt": "{long}"}}',
        f'{{"input": [{{"role": "user", "content": [{{"text": "{long}"}}]}}]}}',
        f'{{"system": [{{"type": "text", "text": "{long}"}}]}}',
        f'{{"prompt": [{",".join(["12"] * 400)}]}}',
    ):
        assert len(read_prompt(sent.encode()).blocks) in (7, 8, 9)
    assert len(read_prompt(f'{{"prompt": "{"x" * (MAX_TEXT + 1)}"}}'.encode()).blocks) == MAX_BLOCKS


SHAPES: dict[str, tuple[bytes, bytes, bytes, bytes]] = {
    "integers": (b'{"prompt":[', b"0", b",", b"]}"),
    "lists": (b'{"messages":[', b"[]", b",", b"]}"),
    "objects": (b'{"messages":[', b"{}", b",", b"]}"),
    "strings": (b'{"messages":[', b'""', b",", b"]}"),
    "trees": (b'{"messages":[', b'{"content":{"text":{"url":"x"}}}', b",", b"]}"),
    "escapes": (b'{"prompt":"', rb"\n", b"", b'"}'),
    "quotes": (b'{"prompt":"', rb"\"", b"", b'"}'),
    "wide": (b'{"prompt":"', "\U0001f600".encode(), b"", b'"}'),
    "depth": (b'{"messages":', b"[", b"", b""),
    "tools": (b'{"tools":[', b'{"b":1,"a":2}', b",", b"]}"),
    "members": (b'{"x":{', b'"a":0', b",", b"}}"),
    "floats": (b'{"x":[', b"1.5e3", b",", b"]}"),
    "images": (b'{"images":[', b'"a"', b",", b"]}"),
    "data": (b'{"prompt":"', b"aaaa", b"", b'"}'),
    "space": (b'{"x":1', b" ", b"", b"}"),
}


@pytest.mark.parametrize("size", [1 << 20, 3 << 20, 30 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_body_takes_a_second_to_read(shape: str, size: int) -> None:
    """In time of the processor; the worst of them take less than a tenth of one."""
    head, one, between, tail = SHAPES[shape]
    body = head + between.join([one] * (size // len(one + between))) + tail
    with cpu_time.at_most(3, time.thread_time):
        found = read_prompt(body)
    assert len(found.blocks) <= MAX_BLOCKS


@pytest.mark.parametrize("escaped", [False, True])
def test_images_count_alike_in_bodies_of_any_size(escaped: bool) -> None:
    """Where a body is so large that its images are taken out before it is read, too."""

    def read(*images: str) -> Prompt:
        asked = [openai(one, f"What is this? {number} " * 20)["messages"][0] for number, one in enumerate(images)]
        text = json.dumps({"messages": asked})
        return read_prompt((text.replace("/", "\\/") if escaped else text).encode())

    first, second = (f"data:image/png;base64,{letter}/{letter * 5_000_000}" for letter in "ij")
    small, large = read(first), read(first, second)
    assert large.blocks[: len(small.blocks)] == small.blocks
    assert len(large.blocks) > 2 * IMAGE_BLOCKS
    assert read(first, second[:-1] + "k").blocks != large.blocks


def stays(head: int) -> float:
    """The share of turns that go where their conversation's last one went, of 24 that share so many bytes."""
    rng, made = random.Random(3), picker()
    words = ["".join(rng.choices("abcdefghijklmnop", k=7)) for _ in range(3000)]

    def text(many: int) -> str:
        return " ".join(rng.choices(words, k=many // 8))

    shared = {"role": "system", "content": text(head)}
    said = [[shared, {"role": "user", "content": text(800)}] for _ in range(24)]
    where, under_way, same, now = dict[int, str](), list[Pick](), list[bool](), 0.0
    for turn in [one for _ in range(4) for one in rng.sample(range(24), 24)]:
        now += 0.1
        found = pick(made, "same", read_prompt(json.dumps({"model": "m", "messages": said[turn]}).encode()), now)
        under_way.append(found)
        if len(under_way) > 6:
            made.end(under_way.pop(rng.randrange(6)))
        if turn in where:
            same.append(where[turn] == found.order[0])
        where[turn] = found.order[0]
        said[turn] += [{"role": "assistant", "content": text(600)}, {"role": "user", "content": text(300)}]
    return sum(same) / len(same)


@pytest.mark.parametrize("head", [10_000, 100_000, 270_000, 400_000, 2_000_000])
def test_turns_stay_however_long_the_beginning_that_conversations_share(head: int) -> None:
    assert stays(head) >= 0.97


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 5000))
@example(2, 0, 168)  # one block, then three: less than twice the bytes
def test_the_end_of_a_request_is_one_that_the_next_one_knows(shared: int, asked: int, answered: int) -> None:
    """Wherever blocks begin and end, while the next one is no more than twice as long."""
    head = "h" * (100 * shared)
    first = read_prompt(body(head + "q" * asked))
    second = read_prompt(body(head + "q" * asked, "a" * min(answered, 100 * shared + asked // 2)))
    assert not first.ends or first.ends[-1] in second.ends
