"""What images take: known before the start, refused with numbers, in the log as in a plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vision import CASES, answer

from octavo import LLM
from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.memory.images import _largest, encoder_bytes, largest_image
from octavo.models.image_reader import ReadsImages
from octavo.worker.worker import Worker

GIB = 1 << 30
SIDES = {"height": 32, "width": 32}
SETTINGS: dict[str, Any] = {
    "llava": {"size": {"shortest_edge": 32}, "crop_size": SIDES},
    "gemma3": {"size": SIDES},
    "idefics3": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
    "qwen3.5": {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4},
}
HOW: dict[str, Any] = {"dtype": "float32", "quantization": "none", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in SETTINGS}
    for name, path in found.items():
        CASES[name].save(path)
        (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS[name]))
    return found


def test_the_cache_must_hold_the_largest_image(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"mm_encoder_cache_tokens \(15\) must hold .*32 x 32 pixels.* at least 16"):
        LLM(str(folders["llava"]), max_model_len=128, mm_encoder_cache_tokens=15, **HOW)
    with pytest.raises(ConfigError, match="mm_encoder_cache_tokens must be an integer >= 1"):
        LLM(str(folders["llava"]), mm_encoder_cache_tokens=0, **HOW)
    rng = np.random.default_rng(0)
    a, b = (CASES["llava"].make_image(rng) for _ in range(2))
    prompts = [[1, a, 2, b, 3], [4, b, 5], [a, 6]]
    tight, roomy = (
        LLM(str(folders["llava"]), max_model_len=128, mm_encoder_cache_tokens=tokens, **HOW) for tokens in (16, None)
    )
    answers = [[one.outputs[0].token_ids for one in answer(llm, prompts, max_tokens=4)] for llm in (tight, roomy)]
    assert answers[0] == answers[1]
    assert roomy.engine.config.scheduler.mm_encoder_cache_tokens == 8192


def test_an_image_that_is_computed_whole_has_room_in_a_step(folders: dict[str, Path]) -> None:
    path = str(folders["gemma3"])
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(9\) .* whose 6 tokens .* at least 10"):
        LLM(path, max_model_len=128, max_num_batched_tokens=9, max_num_seqs=4, **HOW)
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold \(5\) .* at least 6"):
        LLM(path, max_model_len=128, long_prefill_token_threshold=5, **HOW)
    text = LLM(
        path, max_model_len=128, max_num_batched_tokens=9, max_num_seqs=4, limit_mm_per_prompt={"image": 0}, **HOW
    )
    assert "encoder" not in text.engine.executor.memory_shares


@pytest.mark.parametrize("case", ["llava", "gemma3", "qwen3.5"])
def test_the_ledger_has_what_recorded_steps_keep(case: str, folders: dict[str, Path]) -> None:
    llm = LLM(str(folders[case]), max_model_len=128, max_num_batched_tokens=64, max_num_seqs=4, **HOW)
    answer(llm, [[1, CASES[case].make_image(np.random.default_rng(0)), 2]], max_tokens=2)
    worker = llm.engine.executor.worker
    images = worker.runner.device_runner.recorded_steps._images
    kept = sum(tensor.nbytes for tensor in (images.embeds, *images.of_step.deep))
    assert kept and worker.ledger.shares()["encoder"] >= encoder_bytes(llm.config) + kept


def test_nothing_is_kept_free_where_images_are_refused(tmp_path: Path) -> None:
    """For want of the files that say how they are read."""
    CASES["llava"].save(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=100, **HOW)
    assert not {"encoder", "encoder cache"} & llm.engine.executor.memory_shares.keys()


@pytest.mark.parametrize("longest", [40, 300, 5000, 100_000])
def test_the_largest_image_is_one_that_fits_a_prompt(longest: int, tmp_path: Path) -> None:
    described = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
    kwargs = {"max_pixels": 28 * 28 * 4096}
    largest = _largest(str(tmp_path), json.dumps([described, kwargs], sort_keys=True), longest)
    assert largest.num_embeds == min(longest, 4096)
    patches = len(largest.tensors["pixel_values"])
    assert largest.num_embeds <= patches // 4 <= 1.2 * largest.num_embeds + 4


@pytest.mark.parametrize("case", SETTINGS)
def test_a_plan_is_the_ledger(
    case: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: GIB)
    path, flags = str(folders[case]), ["--max-model-len", "512"]
    none = {"limit_mm_per_prompt": {"image": 0}}
    for more in ({}, {"mm_encoder_cache_tokens": 4096}, none, {"quantization": "int8"}):
        args = EngineArgs(model=path, device="cpu", max_model_len=512, skip_tokenizer_init=True, **more)
        with caplog.at_level(logging.INFO):
            worker = Worker(config := args.create_engine_config(progress=False))
        given = [
            f"--{name.replace('_', '-')}={value if isinstance(value, int | str) else json.dumps(value)}"
            for name, value in more.items()
        ]
        assert main(["plan", path, "--cpu", "--json", *flags, *given]) == 0
        said, ledger = json.loads(capsys.readouterr().out), worker.ledger
        assert said["other_bytes"] == dict(ledger.parts)
        assert (said["weights_bytes"], said["num_blocks"]) == (ledger.weights, ledger.num_blocks - 1)
        assert isinstance(worker.model, ReadsImages)
        kept, largest = worker.config.scheduler.mm_encoder_cache_tokens, largest_image(worker.config)
        if largest is None:
            assert kept is None and worker.model.vision is None
            assert not {"encoder", "encoder cache"} & ledger.shares().keys()
            continue
        assert kept == more.get("mm_encoder_cache_tokens", 8192)
        size = 4 if config.model.dtype == "float32" else 2
        assert ledger.shares()["encoder cache"] == kept * config.model.hidden_size * size
        assert ledger.shares()["encoder"] > sum(array.nbytes for array in largest.tensors.values())
        assert "encoder cache" in caplog.text
        assert ledger.weights > sum(one.nbytes for one in worker.model.vision.parameters())
