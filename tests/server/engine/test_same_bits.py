"""A request gives the same tokens, bit for bit, however it is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import emulated_amx
from support.tiny_models import FAMILIES, VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo_kernels.cpu import library

Answers = list[tuple[list[int], float]]  # tokens and their cumulative log-probability, which tells bits apart


def prompts_of(seed: str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 5, 16, 33, 90]))] for _ in range(10)]
    return [{"prompt_token_ids": (shared[: rng.choice([0, 17, 64])] + tokens)} for tokens in own]


def params_of(greedy: bool) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    if greedy:
        return [SamplingParams(temperature=0, **common)] * 10
    return [SamplingParams(temperature=0.9, top_p=0.95, seed=i, **common) for i in range(10)]


def run(llm: LLM, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> Answers:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob or 0.0) for o in outputs]


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    ("family", "greedy"),
    [
        pytest.param(family, greedy, id=f"{family}-{'greedy' if greedy else 'seeded'}", marks=marks)
        for family in FAMILIES
        for greedy in (True, False)  # how tokens are drawn does not depend on the family: one family is enough
        for marks in [[] if greedy or family == "llama" else [pytest.mark.long]]
    ],
)
def test_tokens_do_not_depend_on_how_they_are_computed(
    family: str, greedy: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    compare(tiny_checkpoints[family], prompts_of(family), params_of(greedy), dtype="float32")


@pytest.fixture(params=["this CPU's", *emulated_amx.names()])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of this machine, and those for matrix tiles, which it may lack."""
    before = library.get_library()
    if request.param == emulated_amx.NAME:
        library.use_library(emulated_amx.load())
    yield
    library.use_library(before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"quantization": "int8_per_channel"}, {"quantization": "int8_per_group"}],
    ids=lambda options: "-".join(options.values()),
)
def test_nor_do_those_of_fewer_bits(options: dict[str, str], tiny_checkpoints: dict[str, Path]) -> None:
    """Matrix tiles multiply bfloat16 for any number of rows, int8 with a scale a row for more than 8. This family's
    heads have a size for tiles, and every other layer a window."""
    compare(tiny_checkpoints["gemma2"], prompts_of("gemma2"), params_of(greedy=True), **options)


def compare(folder: Path, prompts: list[dict[str, Any]], params: list[SamplingParams], **options: Any) -> None:
    """Requests alone, batched, in chunks, in blocks of other sizes, with hits in the prefix cache, and preempted."""

    def llm(**changes: Any) -> LLM:
        defaults: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 512}
        return LLM(str(folder), **defaults | options | changes)

    engine = llm(enable_prefix_caching=False)
    groups = engine.engine.executor.kv_layout.groups
    alone = [run(engine, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert run(engine, prompts, params) == alone, "batched"
    assert run(llm(long_prefill_token_threshold=7), prompts, params) == alone, "in chunks of 7"
    for block_size in (32 if "quantization" in options else 1, 64):  # 8-bit keys, their default, come in sixteens
        sizes = {"block_size": block_size, "max_model_len": 256, "num_gpu_blocks_override": 512 * len(groups)}
        assert run(llm(**sizes), prompts, params) == alone, f"blocks of {block_size}"
    if any(group.window for group in groups):
        assert run(llm(disable_hybrid_kv_cache_manager=True), prompts, params) == alone, "windows keep every position"
    caching = llm()
    for again in ("first", "second"):  # partial hits among the prompts at first, full hits then
        assert run(caching, prompts, params) == alone, f"{again} time with prefix caching"
    small = llm(num_gpu_blocks_override=20 * len(groups), max_model_len=256)
    assert run(small, prompts, params) == alone, "preempted"
    assert small.totals.num_preemptions > 0 or (len(groups) == 1 and groups[0].window), "the cache is large enough"


def test_a_small_cache_really_preempts(tiny_checkpoints: dict[str, Path]) -> None:
    """The comparison above would prove nothing if the small cache were large enough."""
    llm = LLM(
        str(tiny_checkpoints["llama"]),
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=20,
        max_model_len=256,
    )
    run(llm, prompts_of("llama"), params_of(True))
    assert llm.totals.num_preemptions > 0


@pytest.mark.sampled
@pytest.mark.parametrize("length", [5, 15, 16, 17, 32, 100, 128])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_prompt_sent_twice_computes_one_token(length: int, family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Also where layers have windows of 24 positions: all of them, or every other one."""
    llm = LLM(str(tiny_checkpoints[family]), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    prompt = {"prompt_token_ids": [3 + (7 * i) % 200 for i in range(length)]}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, length - 1)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_samples_compute_their_prompt_once(tiny_checkpoints: dict[str, Path]) -> None:
    for caching in (True, False):
        llm = LLM(
            str(tiny_checkpoints["llama"]), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=caching
        )
        prompt = {"prompt_token_ids": [3 + (7 * i) % 200 for i in range(303)]}
        params = SamplingParams(temperature=1, seed=3, n=8, max_tokens=20, ignore_eos=True, logprobs=0)
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert llm.totals.num_prompt_tokens == 303 + 7, "seven samples each compute the last prompt token"
        assert len({tuple(o.token_ids) for o in output.outputs}) > 1
        llm.engine.check_integrity()
