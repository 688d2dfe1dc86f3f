"""Steps with images that are recorded once and replayed give what calling each operation gives, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vision import CASES, Prompt, answer

from octavo import LLM


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("case", ["llava", "gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_steps_with_images_are_replayed_to_the_same_numbers(case: str, tmp_path: Path) -> None:
    """Embeddings alone, sight of whole images, turns in three directions, and states for deeper layers; in steps that
    are cut inside images where they may be, beside text, and smaller ones after larger ones."""
    CASES[case].save(tmp_path)
    rng = np.random.default_rng(0)
    a, b = (CASES[case].make_image(rng) for _ in range(2))
    prompts: list[Prompt] = [[5, 17, 200, 3], [7, 8, a, 9, 30, 31], [50, a, 51, b, 52, 53, 54], [b, 40, 41]]
    how: dict[str, Any] = {"dtype": "float32", "quantization": "none", "max_model_len": 160, "max_num_seqs": 4}
    found = []
    for tokens in (256, 24 if CASES[case].whole else 6):
        for is_replayed in (True, False):
            llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=tokens, **how)
            runner = llm.engine.executor.worker.runner.device_runner
            if not is_replayed:
                runner.recorded_steps = None
            found.append([one.outputs[0].logprobs for one in answer(llm, prompts, logprobs=3, max_tokens=8)])
            assert not is_replayed or runner.recorded_steps._image_step is not None
    assert found[0] == found[1] and found[2] == found[3]
