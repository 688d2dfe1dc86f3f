"""What the benchmark's client makes of answers, however they are cut into pieces and whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples_of

from octavo.bench.client import RequestResult, read_result
from octavo.bench.http_client import Exchange, HTTPClient
from octavo.errors import ConfigError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def events(texts: list[str], newline: str = "\n") -> bytes:
    chunks = [json.dumps({"choices": [{"text": text, "finish_reason": None}]}) for text in texts]
    usage = {"choices": [], "usage": {"completion_tokens": 7 * len(texts), "prompt_tokens": 5}}
    lines = [f"data: {line}{newline}{newline}" for line in (*chunks, json.dumps(usage), "[DONE]")]
    return "".join(lines).encode()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


def results_of(answer: Answer, requests: int = 1) -> list[RequestResult]:
    """What one client reads, one request after the other."""

    async def main() -> list[RequestResult]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HTTPClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/", {"X-Key": "yes"})
        async with server:
            exchanges = [await client.post("/v1/completions", {"prompt": "ü"}) for _ in range(requests)]
            client.close()
            return [read_result(exchange, 3, exchange.started - 1.0) for exchange in exchanges]

    return asyncio.run(main())


@pytest.mark.parametrize("how", ["chunked", "length", "until closed"])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    newline=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=examples_of(40), deadline=None)
def test_answers_read_the_same_however_they_are_cut(how: str, texts: list[str], cuts: list[int], newline: str) -> None:
    body = events(texts, newline)
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(1 if how == "until closed" else 2):
            requests.append(await read_request(reader))
            head = {"chunked": "Transfer-Encoding: chunked", "length": f"Content-Length: {len(body)}"}
            writer.write(f"HTTP/1.1 200 OK\r\n{head.get(how, 'Connection: close')}\r\n\r\n".encode())
            places = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})
            for begin, end in pairwise(places):
                piece = body[begin:end]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if how == "chunked" else piece)
                await writer.drain()
            if how == "chunked":
                writer.write(b"0\r\n\r\n")
        writer.close()

    found = results_of(answer, 1 if how == "until closed" else 2)
    for result in found:
        assert (result.success, result.error, result.text) == (True, "", "".join(texts))
        assert (result.output_tokens, result.prompt_len) == (7 * len(texts), 5)
        assert len(result.itls) == len(texts) - 1 and min(result.itls, default=0.0) >= 0.0
        assert result.ttft + sum(result.itls) == pytest.approx(result.latency)
        assert result.start == pytest.approx(1.0)
    assert len(requests) == len(found)
    assert requests[0].startswith(b"POST /base/v1/completions HTTP/1.1\r\n") and b"\r\nX-Key: yes\r\n" in requests[0]


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 900), max_size=15),
)
def test_a_token_has_come_when_its_event_has(texts: list[str], cuts: list[int]) -> None:
    """Its line, that is: the empty one after it says nothing more."""
    body = events(texts)
    ends = [match.end() for match in re.finditer(rb"^data: .*\n", body, re.MULTILINE)][: len(texts)]
    places = sorted({0, *(cut for cut in cuts if cut < len(body)), len(body)})
    pieces = [(10.0 + i, body[begin:end]) for i, (begin, end) in enumerate(pairwise(places))]
    times = [10.0 + next(i for i, place in enumerate(places[1:]) if place >= end) for end in ends]
    result = read_result(Exchange(started=4.0, status=200, pieces=pieces), 1, 3.0)
    assert (result.success, result.output_tokens, result.prompt_len, result.start) == (True, 7 * len(texts), 5, 1.0)
    assert [result.ttft, *result.itls] == [times[0] - 4.0, *(late - early for early, late in pairwise(times))]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (b"SSH-2.0-nothing\r\n", "no HTTP"),
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + events(["a", "b"]), "closed the connection"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "out of luck"}}\n\n', "out of luck"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {[\n\n", "no stream of completions"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: 3\n\n", "no stream of completions"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "without a token"),
    ],
)
def test_errors_are_reported(answer: bytes, error: str) -> None:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    for result in results_of(send, 2):
        assert not result.success and error in result.error


def test_no_server_is_an_error_of_the_request() -> None:
    exchange = asyncio.run(HTTPClient("http://127.0.0.1:1", {}).post("/", {}))
    assert "refused" in read_result(exchange, 1, 0.0).error.lower() or exchange.error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://there", "http://[::1", "http://there:port"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        HTTPClient(url, {})
