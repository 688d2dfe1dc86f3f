"""The reader of HTTP/2's frames, beside one that waits for all of them and looks at each byte by itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo_router.frames import DATA, MAX_PAYLOAD, PADDED, FrameError, Frames, frame

Told = tuple[int, int, int, bytes]
SIZES = st.integers(0, 40) | st.sampled_from([MAX_PAYLOAD - 1, MAX_PAYLOAD])
KINDS, STREAMS = st.sampled_from([DATA, DATA, DATA, *range(1, 10), 255]), st.integers(0, 2**31 - 1)


def plainly(data: bytes) -> list[Told]:
    """All frames that are whole, by the table of RFC 9113's section 4.1."""
    found, left = list[Told](), list(data)
    while len(left) >= 9:
        length = left[0] * 65536 + left[1] * 256 + left[2]
        if len(left) < 9 + length:
            break
        stream = (left[5] % 128) * 2**24 + left[6] * 2**16 + left[7] * 2**8 + left[8]
        found.append((left[3], left[4], stream, bytes(left[9 : 9 + length])))
        left = left[9 + length :]
    return found


def put_together(told: list[Told], frames: list[Told]) -> list[Told]:
    """The parts of each frame as one, however many parts there are. `frames`: those that were sent."""
    out, at = list[Told](), 0
    for kind, flags, stream, payload in frames:
        parts = b""
        while at < len(told):
            said = told[at]
            assert (said[0], said[2]) == (kind, stream)
            parts, at = parts + said[3], at + 1
            assert len(parts) <= len(payload)
            if len(parts) == len(payload):
                out.append((kind, said[1], stream, parts))
                break
            assert kind == DATA and not flags & PADDED, "these come whole"
            assert not said[1], "its end is told before it is here"
    assert at == len(told)
    return out


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ordered = sorted(one % (len(data) + 1) for one in cuts)
    return [data[a:b] for a, b in zip([0, *ordered], [*ordered, len(data)], strict=True)]


@given(
    st.lists(st.tuples(KINDS, st.integers(0, 255), STREAMS, SIZES), max_size=8),
    st.lists(st.integers(0, 2**20), max_size=40),
    st.booleans(),
)
@example([(DATA, 1, 1, MAX_PAYLOAD), (DATA, 1, 3, 0), (DATA, 9, 5, 5)], list(range(60)), True)
def test_any_frames_in_any_pieces_are_those_that_were_sent(sent: Any, cuts: list[int], reserved: bool) -> None:
    """The highest bit of a stream's number means nothing, whoever sets it."""
    top = 2**31 if reserved else 0
    made = [frame(kind, flags, stream + top, bytes(i % 251 for i in range(n))) for kind, flags, stream, n in sent]
    data, reader = b"".join(made), Frames()
    told = [(*head, bytes(payload)) for piece in pieces(data, cuts) for *head, payload in reader.feed(piece)]
    assert put_together(told, plainly(data)) == plainly(data)  # type: ignore[arg-type]


@given(st.binary(max_size=200), st.lists(st.integers(0, 2**20), max_size=20))
def test_noise_is_what_it_is_in_one_piece_or_refused(noise: bytes, cuts: list[int]) -> None:
    def read(parts: list[bytes]) -> tuple[bytes, bool]:
        reader, said = Frames(), b""
        try:
            for part in parts:
                for kind, _, stream, payload in reader.feed(part):
                    said += repr((kind, stream)).encode() * bool(kind) + bytes(payload)
        except FrameError:
            return said, True
        return said, False

    assert read(pieces(noise, cuts)) == read([noise])


def test_more_than_was_offered_is_refused_by_its_head_alone() -> None:
    with pytest.raises(FrameError, match="16385"):
        list(Frames().feed((MAX_PAYLOAD + 1).to_bytes(3) + bytes(6)))


def test_bodies_are_not_copied_to_be_told() -> None:
    data = frame(DATA, 0, 1, bytes(9000)) + frame(DATA, 0, 1, bytes(9000))
    assert all(payload.obj is data for *_, payload in Frames().feed(data))
