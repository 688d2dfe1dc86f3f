"""Steps that overlap, on rows that live on the device, give what steps one after the other give.

The runner of GPUs runs here on the CPU: what it captures is done anew at every replay, into the results' first place.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.overlapped import CASES, PARAMS, answers, overlapped, prompts_of, tiny
from support.speculation import alike

from octavo import SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overlapping_changes_no_token(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    family, changes = CASES[case]
    path, prompts = tiny_checkpoints[family], prompts_of(family, len(PARAMS))
    params = [SamplingParams(**values) for values in PARAMS]
    one, two = tiny(path, **changes), overlapped(tiny(path, **changes))
    for _ in range(2):  # the second time prompts are found in the cache
        made = answers(two.generate(prompts, params, use_tqdm=False))
        assert alike(made, answers(one.generate(prompts, params, use_tqdm=False)))
        two.engine.check_integrity()
        assert not two.engine.has_unfinished_requests() and not two.engine.scheduler.num_in_flight


def test_sequences_that_end_or_are_aborted_leave_nothing_to_those_after_them(tiny_checkpoints: dict[str, Path]) -> None:
    """Rows, blocks and tokens under way of sequences that go are not seen by those that come, with the same ids too."""
    rng = random.Random(5)
    llm = tiny(tiny_checkpoints["llama"], enable_prefix_caching=False, max_num_seqs=4, long_prefill_token_threshold=3)
    prompts = prompts_of("aborted", 12)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(12)]
    alone = [
        llm.generate([p], [s], use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    core = overlapped(llm).engine
    ids = [f"r{i % 5}" for i in range(120)]
    running: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    finished = 0
    while ids or running:
        if ids and ids[0] not in running and rng.random() < 0.6:
            request_id, which = ids.pop(0), rng.randrange(12)
            running[request_id], got[request_id] = which, []
            prompt = prompts[which]
            request = llm._input.process(request_id, prompt, params[which])
            core.add_request(request)
        elif running and rng.random() < 0.25:
            request_id = rng.choice(list(running))
            core.abort_requests([request_id])
            del running[request_id]
        for output in core.step().outputs:
            if output.request_id in running and output.finish_reason != "abort":
                got[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.error is None
                    assert got[output.request_id] == alone[running.pop(output.request_id)]
                    finished += 1
        core.check_integrity()
    assert finished > 15


def test_a_token_under_way_is_not_written_into_the_row_of_another_sequence(tiny_checkpoints: dict[str, Path]) -> None:
    """A sequence is aborted while its token is on the way; the one that gets its row is in the middle of its prompt
    when that token arrives.
    """
    llm = tiny(tiny_checkpoints["llama"], enable_prefix_caching=False, max_num_seqs=1, long_prefill_token_threshold=3)
    (first,), (second,) = prompts_of("short", 1), [{"prompt_token_ids": list(range(5, 65))}]
    first["prompt_token_ids"] = first["prompt_token_ids"][:1]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone = llm.generate([second], [params], use_tqdm=False)[0].outputs[0].token_ids
    core = overlapped(llm).engine
    for steps in range(1, 20):
        core.add_request(llm._input.process(f"a{steps}", first, SamplingParams(max_tokens=40, ignore_eos=True)))
        for _ in range(steps):
            core.step()
        core.abort_requests([f"a{steps}"])
        core.add_request(llm._input.process(f"b{steps}", second, params))
        got: list[int] = []
        while core.has_unfinished_requests():
            got += [t for output in core.step().outputs for t in output.new_token_ids if output.request_id[0] == "b"]
        assert got == alone, f"aborted after {steps} steps"
