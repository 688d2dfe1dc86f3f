"""After the warm-up no request has a kernel compiled, and the warm-up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.overlapped import PARAMS, answers, overlapped, prompts_of, tiny
from triton.runtime.interpreter import InterpretedFunction

import octavo_kernels
from octavo import SamplingParams
from octavo.worker.gpu.warm_up import warm_up
from octavo.worker.model_runner import ModelRunner
from octavo_kernels.triton import INTERPRETED, sampling


def runner_of(llm: Any) -> ModelRunner:
    return llm.engine.executor.worker.runner


def test_it_leaves_nothing_behind(tiny_checkpoints: dict[str, Path]) -> None:
    prompts, params = prompts_of("warm", len(PARAMS)), [SamplingParams(**values) for values in PARAMS]
    llm = tiny(tiny_checkpoints["llama"])
    expected = answers(llm.generate(prompts, params, use_tqdm=False))
    warm = overlapped(llm)
    for cache in runner_of(warm).kv_cache.layers:
        cache.fill_(7.0)  # memory that nobody has written may hold NaN, which equals nothing
    warm_up(runner_of(warm), warm.engine.config.scheduler)
    assert all((cache == 7.0).all() for cache in runner_of(warm).kv_cache.layers), "keys were written"
    runner_of(warm).requests.batch.check_integrity()
    assert not runner_of(warm).requests.batch.row_of
    found = answers(warm.generate(prompts, params, use_tqdm=False))
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert (ours[0], *ours[2:]) == (theirs[0], *theirs[2:])
        assert (ours[1] or 0.0) == pytest.approx(theirs[1] or 0.0, rel=1e-6), "two samplers add in orders of their own"


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_the_shortest_models_start(max_model_len: int, tiny_checkpoints: dict[str, Path]) -> None:
    llm = overlapped(tiny(tiny_checkpoints["llama"], max_model_len=max_model_len))
    runner = runner_of(llm)
    warm_up(runner, llm.engine.config.scheduler)
    assert not runner.requests.batch.row_of


class Variants:
    """What Triton would compile: a kernel, its constants, and of each argument what it specialises on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[tuple[Any, ...]] = set()
        run = InterpretedFunction.run

        def noted(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            plain = function.kwargs.get("do_not_specialize") or ()
            names = zip(function.arg_names, args, strict=False)
            kinds = tuple(self._kind(value, name in plain) for name, value in names)
            self.found.add((function.__name__, kinds, *sorted(kwargs.items())))
            return run(function, *args, grid=grid, warmup=warmup, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", noted)

    def _kind(self, value: Any, plain: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(self._kind(part, False) for part in value)
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int):
            return "int", value >= 2**31, None if plain else value == 1, None if plain else value % 16 == 0
        return type(value)


@pytest.fixture
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_KERNEL_BACKEND", "triton")
    yield
    monkeypatch.undo()
    octavo_kernels.select_backend("auto")


@pytest.mark.long  # test_pretended_gpu.py shows the same by kernels that are really compiled, and does not run them
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")
def test_requests_compile_nothing(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, triton_backend: None
) -> None:
    """Lengths that widen the block table, odd and even numbers of rows, every kind of sampling, log-probabilities."""
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig(tile=128, steps=4, keep=32))
    variants = Variants(monkeypatch)
    llm = overlapped(
        tiny(
            tiny_checkpoints["llama"],
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            max_model_len=320,
            max_num_batched_tokens=64,
        )
    )
    runner = runner_of(llm)
    runner.device_runner.capture_all()
    warm_up(runner, llm.engine.config.scheduler)
    known = set(variants.found)
    lengths = [1, 2, 3, 5, 8, 9, 40, 270]
    prompts = [{"prompt_token_ids": [7 + i] * length} for i, length in enumerate(lengths)]
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"logprobs": 3},
        {"logit_bias": {4: 1.0}},
        {"min_p": 0.1, "presence_penalty": 0.5},
        {"logprobs": 1, "temperature": 0},
        {"allowed_token_ids": [4, 5, 6]},
        {"prompt_logprobs": 2},
    ]
    params = [SamplingParams(max_tokens=2, ignore_eos=True, **kind) for kind in kinds]
    llm.generate(prompts, params, use_tqdm=False)
    new = variants.found - known
    assert not new, "\n".join(map(str, sorted(new, key=str)))
