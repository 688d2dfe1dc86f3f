"""The scheduler's promises, one by one."""

from __future__ import annotations

import logging
import random
from collections import deque

import pytest
from core_helpers import EOS, core_request, make_scheduler, run_step, run_until_done, tokens_for

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import EngineCoreOutput, LogprobsLists
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput


def given(step: SchedulerOutput) -> dict[str, int]:
    """Request id -> tokens handed out, for requests with one sample."""
    return {req_id.partition("#")[2]: num for req_id, num in step.num_scheduled_tokens.items()}


def final(steps: list[tuple[SchedulerOutput, list[EngineCoreOutput]]], request_id: str) -> EngineCoreOutput:
    [output] = [o for _, outputs in steps for o in outputs if o.request_id == request_id and o.finish_reason]
    return output


# -- prefix hits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 15, 16, 17, 32, 100, 128])
@pytest.mark.parametrize("first_ends", [True, False])
def test_a_prompt_sent_twice_is_computed_once(length: int, first_ends: bool) -> None:
    scheduler = make_scheduler()
    prompt = [i % 7 for i in range(length)]
    scheduler.add_request(core_request("first", prompt, max_tokens=2 if first_ends else 500, ignore_eos=True))
    run_step(scheduler)  # computes the prompt; with this step's result it is confirmed
    if first_ends:
        run_until_done(scheduler)
    scheduler.add_request(core_request("second", prompt, max_tokens=1))
    step, outputs = run_step(scheduler)
    assert given(step)["second"] == 1
    [output] = [o for o in outputs if o.request_id == "second"]
    assert output.num_cached_tokens == length - 1
    assert output.finish_reason == "length"


def test_the_next_turn_of_a_conversation_finds_question_and_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("turn 1", [5] * 20, max_tokens=10, ignore_eos=True))
    run_until_done(scheduler)
    scheduler.add_request(core_request("turn 2", [5] * 20 + [1] * 10 + [6] * 5, max_tokens=1))
    [output] = run_step(scheduler)[1]
    assert output.num_cached_tokens == 29  # the last token of the answer was sampled and never computed


@pytest.mark.parametrize("other", ["b", None])
def test_no_hits_across_salts(other: str | None) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("first", [1] * 40, max_tokens=1, cache_salt="a"))
    run_until_done(scheduler)
    scheduler.add_request(core_request("second", [1] * 40, max_tokens=1, cache_salt=other))
    assert run_step(scheduler)[1][0].num_cached_tokens == 0
    scheduler.add_request(core_request("third", [1] * 40, max_tokens=1, cache_salt="a"))
    assert run_step(scheduler)[1][0].num_cached_tokens == 39


def test_hit_counters_count_each_request_once_even_when_it_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    for name in ("a", "b"):
        scheduler.add_request(core_request(name, [3] * 10, max_tokens=15, ignore_eos=True))
    queries = hits = preemptions = 0
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
        stats = scheduler.make_stats()
        queries, hits = queries + stats.prefix_cache_queries, hits + stats.prefix_cache_hits
        preemptions += stats.num_preemptions
    assert preemptions > 0
    assert (queries, hits) == (20, 0)  # both were admitted in one step, when nothing was confirmed


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [303, 304])
def test_n_samples_compute_their_prompt_once(length: int) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("r", [i % 11 for i in range(length)], n=8, max_tokens=5, ignore_eos=True))
    steps = run_until_done(scheduler)
    handed_out = sum(step.total_num_scheduled_tokens for step, _ in steps)
    # The prompt once; its last token again for each other sample's logits; then 4 tokens of each to get the 5th.
    assert handed_out == length + 7 + 8 * 4
    assert max(len(scheduler_step.num_scheduled_tokens) for scheduler_step, _ in steps) == 8
    copies = [pair for step, _ in steps for pair in step.block_copies]
    assert len(copies) <= (8 if length % 16 else 0)
    ended = {(o.index, o.finish_reason) for _, outputs in steps for o in outputs if o.finish_reason}
    assert ended == {(i, "length") for i in range(8)}


def test_samples_of_a_request_that_cannot_all_run_at_once_still_share() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add_request(core_request("r", [4] * 50, n=6, max_tokens=3, ignore_eos=True))
    steps = run_until_done(scheduler)
    assert sum(step.total_num_scheduled_tokens for step, _ in steps) == 50 + 5 + 6 * 2


def test_when_the_first_sample_goes_another_computes_the_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(core_request("r", [4] * 25, n=3, max_tokens=2))
    run_step(scheduler)
    scheduler.finish_sample("r", 0, RequestStatus.FINISHED_STOPPED)
    steps = run_until_done(scheduler)
    ended = {(o.index, o.finish_reason) for _, outputs in steps for o in outputs if o.finish_reason}
    assert ended == {(1, "length"), (2, "length")}


# -- who gets the budget -----------------------------------------------------------------------------------------------


def test_decode_never_waits_behind_a_long_prompt() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_batched_tokens=64)
    for i in range(4):
        scheduler.add_request(core_request(f"short {i}", [i] * 3, max_tokens=100, ignore_eos=True))
    run_step(scheduler)
    scheduler.add_request(core_request("long", [9] * 1000, max_tokens=2))
    for _ in range(17):
        step = run_step(scheduler)[0]
        assert given(step) == {
            "short 0": 1,
            "short 1": 1,
            "short 2": 1,
            "short 3": 1,
            "long": min(60, given(step)["long"]),
        }
        assert step.total_num_scheduled_tokens <= 64
    assert given(step)["long"] == 1000 - 16 * 60
    assert "0#long" in step.sampled_req_ids


def test_long_prefill_token_threshold_leaves_room_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=20)
    scheduler.add_request(core_request("long", [1] * 100, max_tokens=1))
    scheduler.add_request(core_request("short", [2] * 10, max_tokens=1))
    assert given(run_step(scheduler)[0]) == {"long": 20, "short": 10}
    assert given(run_step(scheduler)[0]) == {"long": 20}


def test_one_step_admits_as_many_as_budget_and_rows_allow() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=50, max_num_seqs=3)
    for name in "abcd":
        scheduler.add_request(core_request(name, [1] * 10, max_tokens=1))
    assert given(run_step(scheduler)[0]) == {"a": 10, "b": 10, "c": 10}
    assert given(run_step(scheduler)[0]) == {"d": 1}  # the others' prompt is the same and confirmed by now


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "cab":
        scheduler.add_request(core_request(name, [1, 2], max_tokens=2, ignore_eos=True, priority=ord("c") - ord(name)))
    order = [name for step, _ in run_until_done(scheduler) for name in given(step)]
    assert order == ["c", "c", "a", "a", "b", "b"]


def test_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority, arrival in (("late", 1, 3.0), ("early", 1, 2.0), ("urgent", 0, 4.0)):
        scheduler.add_request(core_request(name, [1, 2], max_tokens=1, priority=priority, arrival_time=arrival))
    order = [name for step, _ in run_until_done(scheduler) for name in given(step)]
    assert order == ["urgent", "early", "late"]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_nothing_is_admitted_unless_its_whole_prompt_fits() -> None:
    """Even when its first chunk would, and when the rest of an admitted prompt is still to be allocated."""
    scheduler = make_scheduler(
        num_blocks=16, block_size=4, max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_seqs=4
    )
    scheduler.add_request(core_request("first", [1] * 40, max_tokens=2, ignore_eos=True))  # 10 blocks
    scheduler.add_request(core_request("second", [2] * 28, max_tokens=2, ignore_eos=True))  # 7: one too many
    seen = []
    while scheduler.has_unfinished_requests():
        step, _ = run_step(scheduler)
        seen.append(set(given(step)))
    assert seen[:6] == [{"first"}] * 6
    assert {"second"} in seen
    assert scheduler.counters.num_preemptions == 0


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="16 tokens needs 5 KV cache blocks, the cache has 4"):
        scheduler.add_request(core_request("r", [1] * 16))
    with pytest.raises(ValueError, match="prompt is empty"):
        scheduler.add_request(core_request("r", []))
    scheduler.add_request(core_request("r", [1] * 15, max_tokens=1))
    with pytest.raises(ValueError, match="'r' is already in use"):
        scheduler.add_request(core_request("r", [1]))
    assert final(run_until_done(scheduler), "r").finish_reason == "length"
    scheduler.add_request(core_request("r", [1], max_tokens=1))  # the id is free again


def test_a_pool_too_small_for_the_longest_sequence_is_refused() -> None:
    """Such a sequence would preempt itself for ever."""
    make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    with pytest.raises(ValueError, match="max_model_len 17 needs 5 KV cache blocks, the cache has 4"):
        make_scheduler(num_blocks=4, block_size=4, max_model_len=17)


def test_allocated_blocks_are_nearly_full() -> None:
    rng = random.Random(0)
    scheduler = make_scheduler(num_blocks=200 * 64, max_num_seqs=200, max_num_batched_tokens=200_000)
    for i in range(200):
        scheduler.add_request(core_request(str(i), [i] * rng.randint(100, 1000), max_tokens=3, ignore_eos=True))
    for _ in range(2):
        run_step(scheduler)
        tokens = sum(r.num_computed_tokens for r in scheduler.running.values())
        allocated = (scheduler.kv.pool.num_usable_blocks - scheduler.kv.pool.num_free_blocks) * 16
        assert len(scheduler.running) == 200 and tokens / allocated >= 0.95


def fill_up(policy: str) -> Scheduler:
    """a, b and c run with a full pool each of whose growth needs somebody's blocks; their priorities are 2, 0, 1."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=24, policy=policy)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        prompt = [ord(name)] * 8
        scheduler.add_request(core_request(name, prompt, max_tokens=5, ignore_eos=True, priority=priority))
    assert sorted(given(run_step(scheduler)[0])) == ["a", "b", "c"]
    return scheduler


def test_fcfs_preempts_the_last_and_resumes_it_first(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = fill_up("fcfs")
    scheduler.add_request(core_request("later", [7], max_tokens=1))
    with caplog.at_level(logging.INFO):
        step, _ = run_step(scheduler)
    # c goes so that a can grow; b takes c's other block. Nobody is admitted in a step that preempts.
    assert given(step) == {"a": 1, "b": 1}
    assert step.finished_req_ids == ["0#c"]
    assert "preempting 0#c" in caplog.text and "for 0#a" in caplog.text
    assert [r.request_id for r in scheduler.waiting] == ["c", "later"]
    steps = run_until_done(scheduler)
    ends = [o.request_id for _, outputs in steps for o in outputs if o.finish_reason]
    assert ends == ["a", "b", "later", "c"]  # later is short and starts beside c
    resumed = next(data for step, _ in steps for data in step.scheduled_new_reqs if data.req_id == "0#c")
    assert resumed.token_ids == [ord("c")] * 8 + [1]


def test_a_preempted_sequence_goes_on_from_what_is_left_of_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    scheduler.add_request(core_request("a", [1] * 4, max_tokens=10, ignore_eos=True))
    scheduler.add_request(core_request("b", [2] * 18, max_tokens=8, ignore_eos=True))
    steps = run_until_done(scheduler)
    first, again = (data for step, _ in steps for data in step.scheduled_new_reqs if data.req_id == "0#b")
    assert first.num_computed_tokens == 0
    assert again.num_computed_tokens >= 16  # all but the block that a needed
    assert final(steps, "b").num_cached_tokens == 0  # what a request reports is its first admission


def test_priority_preempts_the_least_important_and_gives_its_budget_back() -> None:
    scheduler = fill_up("priority")
    step, _ = run_step(scheduler)
    # By order of need b and c take a's two blocks.
    assert given(step) == {"b": 1, "c": 1}
    assert step.finished_req_ids == ["0#a"]
    ends = [o.request_id for _, outputs in run_until_done(scheduler) for o in outputs if o.finish_reason]
    assert ends == ["b", "c", "a"]


def test_a_victim_that_was_given_tokens_in_this_step_returns_its_share() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=5, policy="priority")
    for name, length, priority in (("p", 4, 9), ("q", 7, 0), ("r", 8, 5)):
        prompt = [ord(name)] * length
        scheduler.add_request(core_request(name, prompt, max_tokens=9, ignore_eos=True, priority=priority))
        step, _ = run_step(scheduler)
    assert given(step) == {"p": 1, "q": 3, "r": 1}
    assert given(run_step(scheduler)[0]) == {"p": 1, "q": 1, "r": 3}
    # q takes the last block, so that r needs p's, and then has p's share of the budget as well.
    step, _ = run_step(scheduler)
    assert step.finished_req_ids == ["0#p"]
    assert given(step) == {"q": 1, "r": 4}
    assert step.sampled_req_ids == ["0#q", "0#r"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, policy="priority")
    scheduler.add_request(core_request("a", [1] * 8, max_tokens=5, ignore_eos=True, priority=0))
    scheduler.add_request(core_request("victim", [2] * 22, max_tokens=5, ignore_eos=True, priority=9))
    run_step(scheduler)
    scheduler.add_request(core_request("later", [3], max_tokens=1, priority=1))
    assert given(run_step(scheduler)[0]) == {"a": 1}  # although there is room for it now
    assert given(run_step(scheduler)[0]) == {"a": 1, "later": 1}


def test_samples_that_wait_give_way_when_nobody_else_can_run() -> None:
    """A leader that needs the very blocks that its waiting samples hold must not wait for them for ever."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_seqs=1, max_model_len=16)
    scheduler.add_request(core_request("r", [1] * 14, n=3, max_tokens=2, ignore_eos=True))
    steps = run_until_done(scheduler, max_steps=50)
    assert {(o.index, o.finish_reason) for _, outs in steps for o in outs if o.finish_reason} == {
        (0, "length"),
        (1, "length"),
        (2, "length"),
    }


# -- endings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len", "embedding"])
def test_no_step_is_spent_beyond_the_limit(in_flight: int, limit: str) -> None:
    scheduler = make_scheduler(max_model_len=10 + 4 if limit == "max_model_len" else 100)
    fields = {"max_tokens": 4} if limit == "max_tokens" else {"max_tokens": 50}
    if limit == "embedding":
        fields["pooling"] = "last"  # type: ignore[assignment]
    scheduler.add_request(core_request("r", [1] * 10, ignore_eos=True, **fields))
    steps: list[SchedulerOutput] = []
    pending: list[ModelRunnerOutput] = []
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_unfinished_requests():
        while len(pending) < in_flight:
            step = scheduler.schedule()
            if not step.num_scheduled_tokens:
                break
            steps.append(step)
            pending.append(ModelRunnerOutput(embeddings={"0#r": [0.5]}) if limit == "embedding" else tokens_for(step))
        outputs += scheduler.update_from_output(pending.pop(0))
    assert not pending
    assert sum(step.total_num_scheduled_tokens for step in steps) == (10 if limit == "embedding" else 13)
    assert len([t for o in outputs for t in o.new_token_ids]) == (0 if limit == "embedding" else 4)
    assert outputs[-1].finish_reason == ("stop" if limit == "embedding" else "length")
    assert outputs[-1].embedding == ([0.5] if limit == "embedding" else None)


def test_the_token_after_a_stop_never_appears() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("r", [1] * 3, max_tokens=10))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.sampled_req_ids == ["0#r"]  # on the way before the stop was known
    [output] = scheduler.update_from_output(tokens_for(first, EOS))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([EOS], "stop", None)
    assert scheduler.update_from_output(tokens_for(second, 5)) == []
    scheduler.check_integrity()
    assert scheduler.kv.usage == 0.0


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [1, EOS], "stop", None),
        ({"stop_token_ids": [4]}, [1, 4], "stop", 4),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], "length", None),
        ({"min_tokens": 3}, [EOS, EOS, EOS], "stop", None),
        ({"max_tokens": None}, [1] * 40, "length", None),  # as far as the model goes
    ],
)
def test_sequences_end_by_stop_length_or_eos(
    params: dict, tokens: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = make_scheduler(max_model_len=42)
    scheduler.add_request(core_request("r", [1, 2], **params))
    outputs = [run_step(scheduler, token)[1][0] for token in tokens]
    assert [o.finish_reason for o in outputs] == [None] * (len(tokens) - 1) + [reason]
    assert outputs[-1].stop_reason == stop_reason
    assert not scheduler.has_unfinished_requests()


def test_abort_at_any_moment_frees_everything() -> None:
    for moment in range(8):
        scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=2)
        scheduler.add_request(core_request("r", [1] * 25, n=4, max_tokens=9, ignore_eos=True))
        scheduler.add_request(core_request("other", [2] * 5, max_tokens=2, ignore_eos=True))
        in_flight = [scheduler.schedule() for _ in range(moment // 2)]
        for step in in_flight[: moment % 2 + 1]:
            scheduler.update_from_output(tokens_for(step))
        late = in_flight[moment % 2 + 1 :]
        outputs = scheduler.finish_requests(["r", "nobody"], RequestStatus.FINISHED_ABORTED)
        assert {(o.index, o.finish_reason) for o in outputs} == {(i, "abort") for i in range(4)}
        for step in late:
            assert not [o for o in scheduler.update_from_output(tokens_for(step)) if o.request_id == "r"]
        scheduler.check_integrity()
        run_until_done(scheduler)
        scheduler.schedule()
        assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_usable_blocks


def test_an_error_ends_all_samples_of_its_request_and_no_other_one() -> None:
    """The other samples share keys and values that the failed step was to write."""
    scheduler = make_scheduler()
    scheduler.add_request(core_request("broken", [1] * 20, n=3, max_tokens=9))
    scheduler.add_request(core_request("fine", [2] * 20, max_tokens=2, ignore_eos=True))
    step, second = scheduler.schedule(), scheduler.schedule()
    assert {"1#broken", "2#broken"} <= second.num_scheduled_tokens.keys()
    result = tokens_for(step)
    result.errors["0#broken"] = "NaN"
    outputs = scheduler.update_from_output(result)
    failed = {(o.index, o.finish_reason, o.error) for o in outputs if o.request_id == "broken"}
    assert failed == {(i, "error", "NaN") for i in range(3)}
    scheduler.check_integrity()
    assert [(o.request_id, o.finish_reason) for o in scheduler.update_from_output(tokens_for(second))] == [
        ("fine", "length")
    ]
    scheduler.add_request(core_request("again", [1] * 20, max_tokens=1))
    assert run_step(scheduler)[1][0].num_cached_tokens == 0, "the failed step's leftovers are offered to others"


def test_a_copy_that_fails_is_not_offered_to_others() -> None:
    """The step that computes the prompt is fine; the next one, which copies its unfinished block, is not."""
    scheduler = make_scheduler()
    scheduler.add_request(core_request("r", [1] * 20, n=2, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.block_copies
    scheduler.update_from_output(tokens_for(first))
    scheduler.update_from_output(ModelRunnerOutput(errors=dict.fromkeys(second.num_scheduled_tokens, "broken")))
    scheduler.add_request(core_request("again", [1] * 20, max_tokens=1))
    assert run_step(scheduler)[1][0].num_cached_tokens == 16


def test_an_error_that_comes_after_the_first_sample_ended_still_ends_the_others() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("r", [1] * 20, n=2, max_tokens=9))
    step = scheduler.schedule()
    scheduler.finish_sample("r", 0, RequestStatus.FINISHED_STOPPED)
    [output] = scheduler.update_from_output(ModelRunnerOutput(errors={"0#r": "broken"}))
    assert (output.index, output.finish_reason, output.error) == (1, "error", "broken")
    assert step.sampled_req_ids == ["0#r"] and not scheduler.has_unfinished_requests()


def test_a_late_error_does_not_end_the_next_request_of_that_id() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(core_request("r", [1] * 20, max_tokens=9))
    scheduler.schedule()
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(core_request("r", [1] * 20, max_tokens=1))
    assert scheduler.update_from_output(ModelRunnerOutput(errors={"0#r": "broken"})) == []
    assert run_step(scheduler)[1][0].finish_reason == "length"


# -- prompt_logprobs ---------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_reported_once_even_when_the_prompt_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=5, max_model_len=24)
    scheduler.add_request(core_request("greedy", [1] * 4, max_tokens=16, ignore_eos=True))
    scheduler.add_request(core_request("r", list(range(100, 112)), max_tokens=3, ignore_eos=True, prompt_logprobs=0))
    reported: list[int] = []
    num_computed: dict[str, int] = {}
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        result = tokens_for(step)
        for data in step.scheduled_new_reqs:
            num_computed[data.req_id] = data.num_computed_tokens
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            start = num_computed[req_id]
            num_computed[req_id] += num_tokens
            positions = range(start + 1, min(start + num_tokens, 11) + 1)
            if req_id == "0#r" and positions:
                result.prompt_logprobs[req_id] = LogprobsLists(
                    [[100 + p] for p in positions], [[-1.0] for _ in positions], [1 for _ in positions]
                )
        if step.num_scheduled_tokens:
            for output in scheduler.update_from_output(result):
                if output.prompt_logprobs is not None:
                    assert output.request_id == "r" and output.prompt_logprobs.ranks, "an empty report"
                    reported += [ids[0] for ids in output.prompt_logprobs.token_ids]
    assert scheduler.make_stats().num_preemptions > 0
    assert reported == list(range(101, 112))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("per_step", [1, 2, 3])
@pytest.mark.parametrize("rooms", [1, 3])
def test_samples_keep_no_more_than_their_window_with_steps_in_flight(window: int, per_step: int, rooms: int) -> None:
    """Each within `KVCacheManager.most_blocks`, which `check_integrity` looks at; and nobody waits for ever."""
    room = KVCacheManager(1, 1, windows=(window,), step_tokens=3 * per_step).most_blocks(20)
    kv = KVCacheManager(1 + rooms * room, 1, windows=(window,), step_tokens=3 * per_step)
    scheduler = Scheduler(SchedulerConfig(max_model_len=20, max_num_seqs=2, max_num_batched_tokens=per_step), kv)
    for name, n in (("a", 3), ("b", 2)):  # the second finds the first one's prompt in the cache
        scheduler.add_request(core_request(name, [i % 5 for i in range(14)], n=n, max_tokens=4, ignore_eos=True))
    steps: deque[SchedulerOutput] = deque()
    for _ in range(500):
        while len(steps) < 3 and (step := scheduler.schedule()).num_scheduled_tokens:
            steps.append(step)
        scheduler.check_integrity()
        if not steps:
            break
        scheduler.update_from_output(tokens_for(steps.popleft()))
    assert not scheduler.has_unfinished_requests()
