"""Models with recurrent layers in an engine: the same bits in any company, after preemption and for each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.draft_heads import Head, MedusaHeads, check_head_on_cpu, not_adapting
from support.family_cases import FAMILY_CASES
from support.hybrids import HYBRIDS, LENGTH, engine, prompts, run
from support.speculation import Oracle, all_of, speculate
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import DeviceMemory
from octavo.worker.model_memory import measure_built

MIB = 1 << 20


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    make_model(*FAMILY_CASES[request.param]).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("budget", [8, 9, 40, 400])
def test_no_bit_depends_on_company_or_on_how_prompts_are_cut(model: str, budget: int) -> None:
    some = prompts(1, 3, 16, 33, 90, 64)
    alone = [run(engine(model), [prompt])[0] for prompt in some]
    assert run(engine(model, max_num_batched_tokens=budget), some) == alone
    assert run(engine(model, max_num_batched_tokens=budget, block_size=32), some) == alone


def test_preempted_sequences_are_computed_again_with_the_same_bits(model: str) -> None:
    some = prompts(60, 50, 70, 20)
    plain = engine(model)
    expected, layout = run(plain, some, max_tokens=60), plain.engine.executor.kv_layout
    blocks = layout.state_blocks + max(15, layout.state_blocks + 11)  # in which two may begin, and one has room to end
    small = engine(model, num_gpu_blocks_override=blocks, max_num_batched_tokens=16)
    assert run(small, some, max_tokens=60) == expected
    assert small.totals.num_preemptions > 0


@pytest.mark.parametrize("sequences", [1.0, 1.7, 10.0])
def test_samples_of_a_prompt_are_those_that_each_is_alone(model: str, sequences: float) -> None:
    """They share the prompt's state until they add to it, in a pool that may have room for one sequence alone."""
    (prompt,), others = prompts(37), prompts(21, 5)
    params = {"temperature": 1.0, "n": 4, "seed": 3}
    plain = engine(model)
    expected = run(plain, [prompt], **params)[0]
    assert len({str(tokens) for tokens, _ in expected}) == 4
    blocks = int(plain.engine.executor.kv_layout.most_blocks(LENGTH) * sequences)
    assert run(engine(model, num_gpu_blocks_override=blocks), [prompt, *others], **params)[0] == expected
    assert run(plain, [prompt], **params | {"n": 1})[0] == expected[:1]


@pytest.mark.parametrize("changes", [{}, {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40}], ids=str)
def test_drafts_change_no_bit_whatever_of_them_is_right(
    model: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in turns that go on from a snapshot taken after rejected ones, or every few tokens."""
    monkeypatch.setattr("octavo.engine.core.DEFAULT_INTERVAL", 8)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    some = prompts(1, 3, 16, 33, 90, 64)
    expected = engine(model, enable_prefix_caching=False).generate(some, params, use_tqdm=False)
    turns = [{"prompt_token_ids": one.prompt_token_ids + list(one.outputs[0].token_ids[:-1])} for one in expected]
    later = engine(model, enable_prefix_caching=False).generate(turns, params, use_tqdm=False)
    for number in (1, 2, 4):
        guessing = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": 1, "prompt_lookup_min": 1}
        llm = engine(model, speculative_config=guessing, **changes)
        for kind in ("right", "wrong", "half"):
            llm.reset_prefix_cache()
            counted = llm.totals.spec_decode
            before = counted.num_draft_tokens
            for asked, truth in ((some, expected), (turns, later)):
                speculate(llm, Oracle(kind, truth, VOCAB_SIZE), number)
                assert all_of(llm.generate(asked, params, use_tqdm=False)) == all_of(truth), (kind, number)
                llm.engine.check_integrity()
            assert llm.totals.spec_decode.num_draft_tokens > before
        assert changes or llm.totals.prefix_cache_hits > 0


def test_log_probabilities_of_prompts_are_those_of_answers(model: str) -> None:
    llm, (prompt,) = engine(model), prompts(30)
    tokens, total = run(llm, [prompt])[0][0]
    whole = {"prompt_token_ids": prompt["prompt_token_ids"] + list(tokens)}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([whole], params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    again = sum(next(iter(entry.values())).logprob for entry in found[-len(tokens) :] if entry)
    assert again == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
    ],
)
def test_options_that_do_not_go_with_states_are_refused_by_name(model: str, flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.* recurrent layers"):
        EngineArgs(model=model, skip_tokenizer_init=True, **flags).create_engine_config(progress=False)


@pytest.mark.parametrize("changes", [{}, {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40}], ids=str)
def test_a_draft_model_changes_no_bit(
    model: str, changes: dict[str, Any], tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do states that are kept amid its guesses."""
    monkeypatch.setattr("octavo.engine.core.DEFAULT_INTERVAL", 8)
    some, draft = prompts(1, 3, 16, 33, 90, 64), {"method": "draft_model", "model": str(tiny_checkpoints["llama"])}
    expected = run(engine(model, enable_prefix_caching=False), some, max_tokens=40)
    for number in (1, 3):
        config = draft | {"num_speculative_tokens": number}
        llm = not_adapting(engine(model, speculative_config=config, max_num_seqs=16, **changes))
        for _ in range(2):
            assert run(llm, some, max_tokens=40) == expected
            llm.engine.check_integrity()
        assert llm.totals.spec_decode.num_draft_tokens > 0


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("qwen3.5", {}),
    "eagle3": ("granite4-hybrid", {"taps": (0, 1, 3)}),
    "eagle3 of convolutions": ("lfm2", {"taps": (1, 2)}),
    "eagle3 of gated delta nets": ("qwen3.5", {"taps": (0, 2, 4)}),
    "medusa": ("falcon-h1", {}),
}


@pytest.mark.parametrize("name", HEADS)
def test_draft_heads_guess_as_described_and_change_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = HEADS[name]
    target = make_model(*FAMILY_CASES[family])
    target.save_pretrained(tmp_path / "model")
    head = MedusaHeads(target) if name == "medusa" else Head(target, **settings)
    config, changes = head.save(tmp_path / "head"), {"quantization": "none", "num_gpu_blocks_override": 1600}
    check_head_on_cpu(family, tmp_path / "model", config, head.guesses, monkeypatch, **changes)


def test_a_hybrid_draft_model_is_refused(model: str) -> None:
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="recurrent layers, which cannot guess yet"):
        EngineArgs(model=model, skip_tokenizer_init=True, speculative_config=draft).create_engine_config(progress=False)


def test_a_pool_that_holds_no_state_is_refused_with_what_would_help(model: str) -> None:
    with pytest.raises(ConfigError, match=r"needs .* KV cache blocks .*--kv-cache-memory-bytes"):
        engine(model, num_gpu_blocks_override=2)


@pytest.mark.parametrize("case", [*HYBRIDS, "qwen3.5-moe"])
def test_a_plan_counts_states_as_the_engine_does(case: str, tmp_path: Path) -> None:
    model = str(tmp_path)
    make_model(*FAMILY_CASES[case]).save_pretrained(model)
    sizes: dict[str, Any] = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 8 * MIB}
    args = EngineArgs(model=model, dtype="float32", device="cpu", **sizes)
    config = args.create_engine_config(progress=False)
    plan = make_plan(config, DeviceMemory("cpu", 4096 * MIB), measure_built)
    llm = LLM(model, dtype="float32", skip_tokenizer_init=True, **sizes)
    layout = llm.engine.executor.kv_layout
    assert plan.ledger is not None and plan.ledger.layout.state == layout.state is not None
    assert plan.ledger.num_blocks == llm.engine.executor.num_blocks
    memory, own = plan.memory, llm.engine.executor.worker.model  # type: ignore[attr-defined]
    assert memory.weights == sum(own.weight_bytes_by_kind().values())
    assert any("experts" in kind for kind in own.weight_bytes_by_kind()) == case.endswith("moe")
    assert plan.sequences_of(LENGTH) == (plan.ledger.num_blocks - 1) // (-(-LENGTH // 16) + layout.state_blocks)
    lines = "\n".join(plan.ledger.lines({}))
    assert "state" in lines and f"{layout.state_blocks:,} blocks of the KV cache" in lines and "pending rows" in lines
