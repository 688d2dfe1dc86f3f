"""Which rows the captured sampler serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.overlapped import answers, overlapped, prompts_of, tiny

from octavo import SamplingParams
from octavo.worker.gpu.runner import GPURunner


@pytest.mark.parametrize("stops, eager", [([7], 6), ([], 0)])
def test_rows_past_their_minimum_are_sampled_as_others(
    stops: list[int], eager: int, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While stop tokens are held back the sampler runs one operation at a time, and no longer."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, min_tokens=7, ignore_eos=True, stop_token_ids=stops)
    prompts = prompts_of("minimum", 1)
    llm = tiny(tiny_checkpoints["llama"], enable_prefix_caching=False)
    expected = answers(llm.generate(prompts, [params], use_tqdm=False))
    uncaptured = []
    sample = GPURunner._sample
    monkeypatch.setattr(GPURunner, "_sample", lambda *args: uncaptured.append(1) or sample(*args))
    assert answers(overlapped(llm).generate(prompts, [params], use_tqdm=False)) == expected
    assert len(uncaptured) == eager + 1  # the prompt's own
