"""What a user reads does not depend on how the core delivered it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from octavo.interface.outputs import Logprob, LogprobsTable, RequestOutput
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams
from octavo.metrics.stats import IterationStats

ARRIVAL = 1_000.0


def request(request_id: str = "r", **params) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(**params), eos_token_ids=[], arrival_time=ARRIVAL)


def output(tokens: list[int], index: int = 0, request_id: str = "r", **more) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, index, tokens, **{"scheduled_time": ARRIVAL + 1, **more})


class Queue:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def put(self, state: RequestState) -> None:
        self.outputs.append(state.take())

    def put_error(self, error: Exception) -> None:
        raise error


def logprobs_of(tokens: list[int]) -> LogprobsLists:
    """The token itself at -(id + 1), and two others that are better."""
    return LogprobsLists(
        [[t, 1, t] for t in tokens], [[-(t + 1.0), -0.1, -(t + 1.0)] for t in tokens], [2] * len(tokens)
    )


@given(
    steps=st.lists(st.lists(st.integers(10, 300), min_size=1, max_size=4), min_size=1, max_size=12),
    kind=st.sampled_from(list(RequestOutputKind)),
    logprobs=st.booleans(),
    stop=st.sampled_from([[], ["e"], ["ab", "o"]]),
)
@settings(deadline=None, max_examples=200)
def test_all_kinds_of_outputs_tell_the_same(byte_level, steps, kind, logprobs, stop):
    """Deltas add up to what the final output of the others says: text, ids, log-probabilities, reason."""

    def run(output_kind: RequestOutputKind) -> tuple[str, list[int], list, str | None, object]:
        processor = OutputProcessor(byte_level)
        processor.add_request(request(stop=stop, output_kind=output_kind, logprobs=2 if logprobs else None), "prompt")
        text, ids, entries, last = "", [], [], None
        for i, tokens in enumerate(steps):
            done = "length" if i == len(steps) - 1 else None
            more = {"new_logprobs": logprobs_of(tokens)} if logprobs else {}
            results, _ = processor.process_outputs([output(tokens, finish_reason=done, **more)], ARRIVAL + 2 + i)
            for result in results:
                last = result.outputs[0]
                if output_kind is RequestOutputKind.DELTA:
                    text, ids, entries = text + last.text, ids + last.token_ids, [*entries, *(last.logprobs or [])]
                else:
                    text, ids, entries = last.text, last.token_ids, [*(last.logprobs or [])]
        assert last is not None and not processor.has_unfinished_requests()
        assert processor.num_unfinished_samples == 0
        assert len(entries) == (len(ids) if logprobs else 0)
        return text, ids, entries, last.finish_reason, last.cumulative_logprob

    assert run(kind) == run(RequestOutputKind.FINAL_ONLY)


def test_a_stop_string_ends_the_request_and_the_core_is_to_be_told(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(stop=["fox"], logprobs=0), None)
    ids = byte_level.encode("quick brown fox jumps")
    results, stopped = processor.process_outputs([output(ids, new_logprobs=logprobs_of(ids))], ARRIVAL + 2)
    (result,) = results
    completion = result.outputs[0]
    assert stopped == [("r", 0)]
    assert result.finished and completion.finish_reason == "stop" and completion.stop_reason == "fox"
    assert completion.text == "quick brown "
    assert len(completion.logprobs) == len(completion.token_ids) < len(ids)
    assert processor.process_outputs([output([5])], ARRIVAL + 3) == ([], []), "what was on its way is dropped"


def test_a_stop_string_in_the_last_token_needs_no_telling(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(stop=["x"]), None)
    results, stopped = processor.process_outputs([output(byte_level.encode("ax"), finish_reason="length")], ARRIVAL + 2)
    assert stopped == []
    assert results[0].outputs[0].finish_reason == "stop" and results[0].outputs[0].text == "a"


def test_samples_finish_on_their_own_and_come_in_order(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(n=3, stop=["x"]), None)
    first, _ = processor.process_outputs([output([50], index=2), output([60], index=0)], ARRIVAL + 2)
    assert len(first) == 1, "one output a request and step"
    assert [c.index for c in first[0].outputs] == [0, 1, 2]
    assert [c.token_ids for c in first[0].outputs] == [[60], [], [50]]
    _, stopped = processor.process_outputs([output(byte_level.encode("x"), index=1)], ARRIVAL + 3)
    assert stopped == [("r", 1)]
    last, _ = processor.process_outputs(
        [output([51], index=2, finish_reason="length"), output([61], index=0, finish_reason="stop")], ARRIVAL + 4
    )
    assert last[0].finished
    assert [c.finish_reason for c in last[0].outputs] == ["stop", "stop", "length"]


def test_deltas_of_samples_hold_the_changed_ones_only(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(n=2, output_kind=RequestOutputKind.DELTA), None)
    (result,), _ = processor.process_outputs([output([50], index=1)], ARRIVAL + 2)
    assert [c.index for c in result.outputs] == [1]


def test_prompt_logprobs_may_come_in_parts_and_are_told_once_and_whole(byte_level):
    processor, queue = OutputProcessor(byte_level), Queue()
    processor.add_request(request(prompt_logprobs=2, output_kind=RequestOutputKind.DELTA), None, queue)
    processor.process_outputs([output([], prompt_logprobs=logprobs_of([2]))], ARRIVAL + 2)
    assert not queue.outputs, "who is told a part would take it for the whole"
    processor.process_outputs([output([9], prompt_logprobs=logprobs_of([3, 4]))], ARRIVAL + 2)
    processor.process_outputs([output([9], finish_reason="length")], ARRIVAL + 3)
    first, second = queue.outputs
    assert first.prompt_logprobs[0] is None and [next(iter(p)) for p in first.prompt_logprobs[1:]] == [2, 3, 4]
    assert second.prompt_logprobs is None


def test_the_sampled_token_comes_first_and_knows_its_rank(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(logprobs=2), None)
    (result,), _ = processor.process_outputs(
        [output([70], new_logprobs=logprobs_of([70]), finish_reason="length")], ARRIVAL + 2
    )
    (position,) = result.outputs[0].logprobs
    assert list(position) == [70, 1]
    assert (position[70].rank, position[1].rank) == (2, 1)
    assert position[70].decoded_token == byte_level.decode([70])
    assert result.outputs[0].cumulative_logprob == -71.0


def test_ids_come_through_without_a_tokenizer():
    processor = OutputProcessor(None)
    processor.add_request(request(logprobs=0), None)
    (result,), _ = processor.process_outputs(
        [output([7], new_logprobs=logprobs_of([7]), finish_reason="length")], ARRIVAL + 2
    )
    assert result.outputs[0].token_ids == [7] and result.outputs[0].text == ""


def test_errors_and_refusals_reach_the_request_and_no_other(byte_level):
    processor, failing, refused, fine = OutputProcessor(byte_level), Queue(), Queue(), Queue()
    processor.add_request(request("a"), None, failing)
    processor.add_request(request("b", n=3), None, refused)
    processor.add_request(request("c"), None, fine)
    processor.process_outputs(
        [
            output([], request_id="a", finish_reason="error", error="broken"),
            output([], index=-1, request_id="b", finish_reason="error", error="too large"),
            output([5], request_id="c"),
        ],
        ARRIVAL + 2,
    )
    assert (failing.outputs[-1].error, failing.outputs[-1].finished) == ("broken", True)
    assert refused.outputs[-1].error == "too large"
    assert [c.finish_reason for c in refused.outputs[-1].outputs] == ["error"] * 3
    assert fine.outputs[-1].error is None and not fine.outputs[-1].finished
    assert list(processor.requests) == ["c"] and processor.num_unfinished_samples == 1


def test_an_abort_shows_what_there_was_and_forgets_the_request(byte_level):
    processor, queue = OutputProcessor(byte_level), Queue()
    processor.add_request(request(stop=["fox"]), None, queue)
    processor.process_outputs([output(byte_level.encode("a f"))], ARRIVAL + 2)
    assert queue.outputs[-1].outputs[0].text == "a ", "the f may begin a stop string"
    assert processor.abort_requests(["r", "unknown"]) == ["r"]
    assert queue.outputs[-1].finished and queue.outputs[-1].outputs[0].text == "a f"
    assert queue.outputs[-1].outputs[0].finish_reason == "abort"
    assert not processor.has_unfinished_requests()


def test_an_id_in_use_is_refused(byte_level):
    processor = OutputProcessor(byte_level)
    processor.add_request(request(), None)
    with pytest.raises(ValueError, match="request_id 'r'"):
        processor.add_request(request(), None)


def test_times_of_a_requests_life(byte_level):
    processor, stats = OutputProcessor(byte_level), IterationStats()
    processor.add_request(request(), None)
    processor.process_outputs([output([5], num_cached_tokens=2)], ARRIVAL + 3, stats)
    (result,), _ = processor.process_outputs([output([5], finish_reason="length")], ARRIVAL + 5, stats)
    metrics = result.metrics
    assert (metrics.scheduled_time, metrics.first_token_time, metrics.finished_time) == (1001.0, 1003.0, 1005.0)
    (sample,) = stats.finished
    assert (sample.queued, sample.prefill, sample.decode, sample.inference, sample.e2e) == (1, 2, 2, 4, 5)
    assert sample.time_per_output_token == 2.0
    assert (stats.first_token_seconds, stats.inter_token_seconds) == ([3.0], [2.0])
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generation_tokens) == (3, 2, 2)
    assert result.num_cached_tokens == 2


def test_a_table_of_log_probabilities_is_a_sequence_of_dicts():
    table = LogprobsTable(str, [None, [4, 1, 4], [7]], [None, [-2.0, -0.1, -2.0], [-0.5]], [0, 2, 1])
    dicts = [None, {4: Logprob(-2.0, 2, "4"), 1: Logprob(-0.1, 1, "1")}, {7: Logprob(-0.5, 1, "7")}]
    assert list(table) == dicts and table == dicts and len(table) == 3 and table.num_values == 4
    assert [table[i] for i in (-1, 0, 1)] == [dicts[-1], dicts[0], dicts[1]]
    assert isinstance(table[1:], LogprobsTable) and table[1:] == dicts[1:] and table != dicts[1:]
    table[:].extend([[9]], [[-3.0]], [5])
    assert len(table) == 3, "a copy"
    assert dicts[2] in table
