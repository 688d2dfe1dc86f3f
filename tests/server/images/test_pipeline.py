"""Images where layers are dealt to stages: the first one encodes them, and no bit of an answer is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.images import make_tokenizer
from support.vision import CASES, Prompt, answer

from octavo import LLM
from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.ranks import Stage
from octavo.layers.decoder import DecoderLayer, Elsewhere
from octavo.layers.parallel import TensorParallel
from octavo.loader.load_model import build_model
from octavo.models.image_reader import ReadsImages
from octavo.system import limits

SIZE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
HOW: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "skip_tokenizer_init": True}


def all_of(llm: LLM, prompts: list[Prompt]) -> list[Any]:
    """Tokens, and log-probabilities to the last bit."""
    outputs = answer(llm, prompts, prompt_logprobs=2, logprobs=2, max_tokens=8)
    return [(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.sampled(share=5)
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("llava", {"quantization": "int8"}),
        ("qwen3-vl", {"quantization": "none"}),
        ("qwen2.5-vl", {"quantization": "int8"}),
        ("gemma3", {"quantization": "none"}),
        ("idefics3", {"quantization": "int8", "tensor_parallel_size": 2}),
    ],
)
def test_stages_answer_as_one_does(case: str, more: dict[str, Any], tmp_path: Path) -> None:
    """In steps of any size, cut inside images and with a single token of a prompt, recorded or not."""
    CASES[case].save(tmp_path)
    rng = np.random.default_rng(0)
    a, b = (CASES[case].make_image(rng) for _ in range(2))
    prompts: list[Prompt] = [[5, 17, 200, 3], [7, 8, a, 9, 30, 31], [50, a, 51, b, 52, 53, 54], [b, 40, 41]]
    tokens = 24 if CASES[case].whole else 6
    expected = all_of(LLM(str(tmp_path), max_num_batched_tokens=256, **HOW, **more), prompts)
    sizes: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": tokens}
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, **sizes, **HOW, **more)
    assert all_of(llm, prompts) == expected
    assert all_of(llm, prompts) == expected, "with what the prefix cache has now"
    assert llm.engine.executor.worker.runner.images.num_encoded == 2
    llm.engine.check_integrity()


def stage(case: str, path: Path, number: int, count: int) -> ReadsImages:
    config = EngineArgs(str(path), pipeline_parallel_size=count, **HOW).create_engine_config(progress=False)
    model = build_model(config.model, "cpu", TensorParallel(stage=Stage(number, count)), without_memory=True)
    assert isinstance(model, ReadsImages)
    return model


def test_the_first_stage_has_the_tower_and_what_it_adds_to(tmp_path: Path) -> None:
    """Of DeepStack all layers that it adds to, however few the others get."""
    CASES["qwen3-vl"].save(tmp_path)
    for count, first in ((2, 2), (3, 2)):
        stages = [stage("qwen3-vl", tmp_path, number, count) for number in range(count)]
        assert [one.vision is not None for one in stages] == [True] + [False] * (count - 1)
        own = [[isinstance(layer, DecoderLayer) for layer in one.model.layers].count(True) for one in stages]
        assert own[0] >= first and sum(own) == 4
        assert all(isinstance(one.model.vision, Elsewhere) for one in stages[1:])
    with pytest.raises(ConfigError, match="or are given parts of images, which leaves 2 places to cut; give at most 3"):
        stage("qwen3-vl", tmp_path, 0, 4)


def test_a_plan_says_what_the_first_stage_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of the tower, and memory for images, on no other one."""
    CASES["llava"].save(tmp_path)
    make_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIZE))
    monkeypatch.setattr(limits, "memory_limit", lambda: 1 << 30)
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, **HOW)
    assert (
        main(["plan", str(tmp_path), "--cpu", "-pp", "2", "--max-model-len", "160", "--max-num-seqs", "4", "--json"])
        == 0
    )
    said, ledger = json.loads(capsys.readouterr().out), llm.engine.executor.worker.ledger
    assert said["other_bytes"] == dict(ledger.parts) and ledger.shares()["encoder cache"]
    assert said["weights_bytes_per_stage"][0] == ledger.weights
