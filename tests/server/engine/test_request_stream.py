"""A reader that is slower than the engine misses nothing and piles nothing up."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.async_llm import OutputStream
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import EngineDeadError
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams


def make_request(kind: RequestOutputKind, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1], SamplingParams(n=n, output_kind=kind, max_tokens=None), [], 0.0)


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(10, 300), st.booleans()), min_size=1, max_size=30),
    kind=st.sampled_from([RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]),
)
@settings(deadline=None, max_examples=200)
def test_deltas_add_up_however_late_they_are_read(byte_level, steps, kind):
    """Each step gives one of three samples a token; the third number says whether the reader reads after it."""

    async def run() -> None:
        processor, stream = OutputProcessor(byte_level), OutputStream()
        processor.add_request(make_request(kind, n=3), None, stream)
        expected: dict[int, list[int]] = {0: [], 1: [], 2: []}
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        texts = {0: "", 1: "", 2: ""}

        async def read() -> bool:
            output = await stream.get()
            for completion in output.outputs:
                if kind is RequestOutputKind.DELTA:
                    seen[completion.index] += completion.token_ids
                    texts[completion.index] += completion.text
                else:
                    seen[completion.index] = completion.token_ids
                    texts[completion.index] = completion.text
            return output.finished

        for index, token, reads in steps:
            expected[index].append(token)
            processor.process_outputs([EngineCoreOutput("r", index, [token])], 1.0)
            if reads:
                await read()
        ends = [EngineCoreOutput("r", index, [], finish_reason="length") for index in range(3)]
        processor.process_outputs(ends, 2.0)
        assert await read()
        assert seen == expected
        assert texts == {index: byte_level.decode(ids) for index, ids in expected.items()}

    asyncio.run(run())


def test_a_waiting_reader_is_woken():
    async def run() -> None:
        stream, processor = OutputStream(), OutputProcessor(None)
        processor.add_request(make_request(RequestOutputKind.DELTA), None, stream)
        reader = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        assert not reader.done()
        processor.process_outputs([EngineCoreOutput("r", 0, [5])], 1.0)
        output = await asyncio.wait_for(reader, 1)
        assert output.outputs[0].token_ids == [5]

    asyncio.run(run())


@pytest.mark.parametrize("waiting", [True, False])
def test_the_engines_death_reaches_the_reader_after_what_was_there(waiting):
    async def run() -> None:
        stream, processor = OutputStream(), OutputProcessor(None)
        processor.add_request(make_request(RequestOutputKind.DELTA), None, stream)
        if not waiting:
            processor.process_outputs([EngineCoreOutput("r", 0, [5])], 1.0)
        reader = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put_error(EngineDeadError("gone"))
        if not waiting:
            assert (await reader).outputs[0].token_ids == [5]
            reader = asyncio.create_task(stream.get())
        with pytest.raises(EngineDeadError, match="gone"):
            await asyncio.wait_for(reader, 1)

    asyncio.run(run())


def test_several_requests_share_a_stream(byte_level):
    """Each step's news of each are told once; what was not read in between is one output."""
    told = []
    stream, processor = OutputStream(), OutputProcessor(byte_level)
    for request_id in ("a", "b"):
        request = make_request(RequestOutputKind.DELTA)
        request.request_id = request_id
        processor.add_request(request, None, stream)
    stream.on_output = lambda: told.append(stream.take().request_id)
    processor.process_outputs([EngineCoreOutput("b", 0, [5]), EngineCoreOutput("a", 0, [6])], 1.0)
    assert told == ["b", "a"] and stream.take() is None
    stream.on_output = lambda: None
    for token in (7, 8):
        processor.process_outputs([EngineCoreOutput("a", 0, [token])], 1.0)
    assert stream.take().outputs[0].token_ids == [7, 8] and stream.take() is None


def test_text_that_was_read_is_kept_nowhere(byte_level):
    """Answers may be long, and their readers many."""
    processor, stream = OutputProcessor(byte_level), OutputStream()
    request = make_request(RequestOutputKind.DELTA)
    request.sampling_params.logprobs = 1
    processor.add_request(request, None, stream)
    for token in range(10, 60):
        logprobs = LogprobsLists([[token, 3]], [[-0.1, -3.0]], [1])
        processor.process_outputs([EngineCoreOutput("r", 0, [token], new_logprobs=logprobs)], 1.0)
        stream.take()
    (sample,) = processor.requests["r"].samples
    assert sample.num_tokens == 50
    assert not sample.token_ids and not sample.logprobs and not sample.detokenizer.text
