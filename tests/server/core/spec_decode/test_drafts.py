"""What the scheduler asks of a drafter, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest
from core_helpers import core_request, request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.core.spec_decode.drafts import Drafts
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.lora import Adapter
from octavo.interface.messages import LogprobsLists
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput
from octavo.spec_decode.suffix import SuffixDrafter

VOCAB = 10


class FixedDrafter:
    def __init__(self, drafts: list[int]) -> None:
        self.drafts = drafts

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        pass

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        return self.drafts

    def forget(self, req_id: str) -> None:
        pass


def speculating(drafts: list[int], k: int = 4, num_blocks: int = 64, **config: Any) -> Scheduler:
    config.setdefault("max_model_len", 16 * num_blocks)
    kv = KVCacheManager(num_blocks + 1, 16)
    return Scheduler(SchedulerConfig(**config), kv, Drafts(FixedDrafter(drafts), k, VOCAB))


def prefill(scheduler: Scheduler, prompts: int = 1, **fields: Any) -> None:
    for i in range(prompts):
        scheduler.add_request(core_request(f"r{i}", [1, 2, 3], **fields))
    step = scheduler.schedule()
    assert not step.scheduled_spec_decode_tokens, "of a prompt there is nothing to guess"
    scheduler.update_from_output(ModelRunnerOutput({req_id: [1] for req_id in step.sampled_req_ids}))


def answer(step: SchedulerOutput, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    logprobs = {
        i: LogprobsLists([[token] for token in ids], [[-1.0]] * len(ids), [1] * len(ids)) for i, ids in tokens.items()
    }
    return ModelRunnerOutput({i: tokens[i] for i in step.sampled_req_ids}, logprobs)


@pytest.mark.parametrize("num_accepted", range(5))
def test_the_next_step_begins_after_the_accepted_drafts(num_accepted: int) -> None:
    scheduler = speculating([4, 5, 6, 7])
    prefill(scheduler, max_tokens=40)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"0#r0": 5} and step.scheduled_spec_decode_tokens == {"0#r0": [4, 5, 6, 7]}
    assert not scheduler.schedule().num_scheduled_tokens, "where the next step begins is not known"
    (output,) = scheduler.update_from_output(answer(step, {"0#r0": [4, 5, 6, 7, 8][: num_accepted + 1]}))
    assert output.new_token_ids == [4, 5, 6, 7, 8][: num_accepted + 1]
    request = scheduler.requests["0#r0"]
    assert request.num_computed_tokens == request.num_confirmed_tokens == request.num_tokens - 1 == 4 + num_accepted
    stats = scheduler.make_stats().spec_decode
    assert stats is not None and (stats.num_drafts, stats.num_draft_tokens) == (1, 4)
    assert stats.num_accepted_per_pos == [1] * num_accepted and stats.num_accepted_tokens == num_accepted
    again = scheduler.make_stats().spec_decode
    assert again is not None and again.num_drafts == again.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("fields", "kept", "reason"),
    [
        ({"max_tokens": 40, "stop_token_ids": [5]}, [4, 5], "stop"),
        ({"max_tokens": 40, "stop_token_ids": [5], "min_tokens": 4}, [4, 5, 6], None),
        ({"max_tokens": 40}, [4, 5, 6], None),
    ],
)
def test_a_stop_among_accepted_tokens_ends_there_with_its_logprobs(
    fields: dict[str, Any], kept: list[int], reason: str | None
) -> None:
    scheduler = speculating([4, 5])
    prefill(scheduler, **fields)
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(answer(step, {"0#r0": [4, 5, 6]}))
    assert (output.new_token_ids, output.finish_reason) == (kept, reason)
    assert output.new_logprobs is not None and [ids[0] for ids in output.new_logprobs.token_ids] == kept
    assert len(output.new_logprobs.ranks) == len(kept)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "expected"),
    [(3, 99, 1), (2, 99, 0), (40, 8, 3), (40, 6, 1), (40, 5, 0), (9, 99, 4)],
)
def test_no_more_is_drafted_than_may_be_generated(max_tokens: int, max_model_len: int, expected: int) -> None:
    scheduler = speculating([4, 5, 6, 7], max_model_len=max_model_len)
    prefill(scheduler, max_tokens=max_tokens)
    assert scheduler.schedule().num_scheduled_tokens == {"0#r0": 1 + expected}


@pytest.mark.parametrize(("running", "expected"), [(1, 4), (2, 4), (4, 4), (6, 2), (8, 0)])
def test_drafts_take_only_what_sequences_leave_of_a_step(running: int, expected: int) -> None:
    """With as many sequences as may run there are none, so that a full engine is not slowed down by guesses."""
    scheduler = speculating([4, 5, 6, 7], max_num_seqs=8)
    prefill(scheduler, running, max_tokens=40)
    step = scheduler.schedule()
    assert len(step.num_scheduled_tokens) == running
    assert sum(map(len, step.scheduled_spec_decode_tokens.values())) == min(expected * running, 8 - running)


def test_nobody_is_preempted_for_drafts() -> None:
    scheduler = speculating([4] * 20, k=20, num_blocks=1)
    scheduler.add_request(core_request("r0", [1] * 14, max_tokens=40))
    scheduler.update_from_output(ModelRunnerOutput({i: [1] for i in scheduler.schedule().sampled_req_ids}))
    assert scheduler.schedule().num_scheduled_tokens == {"0#r0": 1}
    assert scheduler.make_stats().num_preemptions == 0


@given(st.lists(st.one_of(st.integers(-3, 14), st.none(), st.text(max_size=1), st.floats(), st.booleans()), max_size=9))
def test_rubbish_is_no_draft(drafts: list[Any]) -> None:
    scheduler = speculating(drafts)
    prefill(scheduler, max_tokens=40)
    for tokens in scheduler.schedule().scheduled_spec_decode_tokens.values():
        assert tokens == drafts[: len(tokens)] and 1 <= len(tokens) <= 4
        assert all(type(token) is int and 0 <= token < VOCAB for token in tokens)


def test_answers_are_learnt_from_within_a_salt_and_an_adapter_alone() -> None:
    """As blocks of the prefix cache are shared: who asks gets the answer of that salt and of those files, or none."""
    adapters = [None, Adapter("a", "", "1"), Adapter("a", "", "2"), Adapter("b", "", "1")]
    asked = [(salt, adapter) for salt in (None, "", "x") for adapter in adapters]
    drafts = Drafts(SuffixDrafter(8, 99, 1.0, 0.1), 4, 99)

    def ask(name: str, number: int, end: list[int]) -> list[int]:
        salt, adapter = asked[number]
        one = request(f"{name}{number}", [1], cache_salt=salt, adapter=adapter, max_tokens=40)
        for token in end:
            one.append_output_token(token, 99)
        found = drafts.propose(one, 4)
        drafts.release(one)
        return found

    for number in range(0, len(asked), 2):
        ask("first", number, [2, 3, 20 + number])
    for number in range(len(asked)):
        assert ask("second", number, [2, 3]) == ([] if number % 2 else [20 + number])
