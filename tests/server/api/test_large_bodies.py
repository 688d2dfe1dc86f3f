"""Large bodies: decoded as any, read in pieces, bounded together; descriptors arrive with what they are for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import string
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu_time import at_most

from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.errors import APIError, shown
from octavo.entrypoints.transport import request_body
from octavo.interface import memory_file
from octavo.interface.memory_file import MemoryFile, receive_file, send_file
from octavo.multimodal.pieces import Pieces

BASE64 = string.ascii_letters + string.digits + "+/="
TEXTS = st.text(BASE64, min_size=10, max_size=60) | st.text(max_size=8) | st.text('\\"u0041é', max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(-999, 999) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def decoded(pieces: list[bytes], images: tuple[request_body.Path, ...] = ()) -> Any:
    """What a body is that arrives in these pieces."""
    received = request_body._Received()
    for piece in pieces:
        received.add(piece)
    return request_body._decode_large(received, images)


def test_escapes_are_not_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "_LEAST_CUT", 6)
    value = {"é" + "A" * 12: ['"' + "B" * 12 + "é0041" + "C" * 12, "\\u0041" + "D" * 12]}
    body = json.dumps(value).encode()
    for first in range(len(body)):
        for second in range(first, len(body), 5):
            assert decoded([body[:first], body[first:second], body[second:]]) == value


@given(VALUES, st.booleans(), st.data())
def test_a_large_body_is_decoded_as_any(value: Any, is_ascii: bool, data: st.DataObject) -> None:
    """However it arrives in pieces, and whatever of it is base64."""
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "replace")
    at = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    pieces = [body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True)]
    least, request_body._LEAST_CUT = request_body._LEAST_CUT, 6  # longer than what is no text
    try:
        assert decoded(pieces) == json.loads(body)
    finally:
        request_body._LEAST_CUT = least


def test_invalid_json_is_refused_with_its_base64_cut_out() -> None:
    run = b"A" * 40_000
    for body in ([b'{"a": 123', run], [b'{"a": "abcdef', run], [b'{"a": "abcdef', run, b'" x}'], [b"[[[[[[", run]):
        with pytest.raises(APIError, match="not valid JSON"):
            decoded(body)


def test_images_stay_in_pieces_where_they_are_looked_for_and_nowhere_else() -> None:
    run = [b"A" * 40_000, b"B" * 40_000]
    text = (b"".join(run) + b"=").decode()
    places = (("messages", None, "content", None, "image_url", "url"), ("images", None))
    body = b'{"messages": [{"content": [{"image_url": {"url": "data:;base64,', *run, b'=", "detail": "data:;base64,'
    body += *run, b'="}}, {"image_url": "data:;base64,', *run, b'="}], "url": "data:;base64,', *run, b"="
    body += b'"}], "images": ["data:;base64,', *run, b'=", "small"], "data:;base64,', *run, b'=": 1}'
    value = decoded(list(body), places)
    url = value["messages"][0]["content"][0]["image_url"].pop("url")
    assert isinstance(url, Pieces) and url.pieces == [b"data:;base64,", *run, b"="]
    assert str(url) == "data:;base64," + text and len(url) == len(str(url)) and url.begin(5) == "data:"
    image, small = value.pop("images")
    assert str(image) == str(url) and small == "small"
    assert shown({"url": url}).startswith('{"url":"data:;base64,AAA')
    whole = "data:;base64," + text
    content = [{"image_url": {"detail": whole}}, {"image_url": whole}]
    assert value == {"messages": [{"content": content, "url": whole}], whole: 1}
    assert decoded([b'{"messages": {"url": "', *run, b'="}}'], (("messages", None),)) == {"messages": {"url": text}}


def test_bodies_are_bounded_and_read_a_few_pieces_a_turn() -> None:
    async def run() -> None:
        bodies = Bodies(limit=100)
        with bodies.share() as one, bodies.share() as other:
            assert one.add(60) and not other.add(50) and bodies.count == 110
        assert bodies.count == 0 and bodies.share
        turns: list[int] = []
        number = 0

        async def read() -> None:
            for _ in range(3):
                await bodies.turn()
                turns.append(number)

        readers = [asyncio.ensure_future(read()) for _ in range(10)]
        readers.append(asyncio.ensure_future(read()))
        await asyncio.sleep(0)
        readers[-1].cancel()
        while not all(reader.done() for reader in readers):
            number += 1
            await asyncio.sleep(0)
        assert len(turns) >= 30 and max(turns.count(turn) for turn in set(turns)) <= 2 * 4

    asyncio.run(run())


def test_a_long_text_in_an_error_is_not_encoded_to_be_cut() -> None:
    image = "A" * 30_000_000
    with at_most(0.05, time.thread_time):
        assert shown({"url": image, "more": [image, {"x": {"y": {"z": image[:10]}}}]}).endswith("...")
        assert shown(image).startswith('"AAA') and shown([1, {"a": None}]) == '[1,{"a":null}]'


def test_files_arrive_by_name_and_what_nobody_fetched_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        for name in ("a" * 64, "b", "c"):
            send_file(ours, name, MemoryFile.of([name.encode(), b"!"]))
        assert bytes(receive_file(theirs, "b").content) == b"b!"
        assert bytes(receive_file(theirs, "c").content) == b"c!"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(memory_file, "_SECONDS", 0.05)
            with pytest.raises(ValueError, match="has not arrived"):
                receive_file(theirs, "d")
        sent = 0
        with pytest.raises(OSError):  # who does not read holds up nobody
            while sent < 100_000:
                send_file(ours, "e", MemoryFile.of([b"e"]))
                sent += 1
        assert bytes(receive_file(theirs, "e").content) == b"e"
        ours.close()
        with pytest.raises(ValueError, match="has not arrived"):
            receive_file(theirs, "f")
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not bytes(MemoryFile.of([]).content)
