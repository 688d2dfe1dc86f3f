"""PIL images offline: `LLM.generate` with multi_modal_data, as in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.adapters import save_adapter
from support.images import image_of, make_tokenizer
from support.vision import CASES

from octavo import LLM, LoRARequest, SamplingParams
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.structured_output import StructuredOutputsParams

IMAGE = 260  # the tokenizer's placeholder
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", quantization="none", max_model_len=256)


def picture(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    return image_of("RGB", width, height, np.random.default_rng(seed))


def test_images_are_expanded_and_cached_by_what_they_show(llm: LLM) -> None:
    def ask(image: Image.Image, *before: int) -> tuple[list[int], int]:
        prompt = {"prompt_token_ids": [*before, *range(20), IMAGE, 5, 6], "multi_modal_data": {"image": image}}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [*before, *range(20), *[IMAGE] * 16, 5, 6]
        assert output.num_cached_tokens is not None
        return output.outputs[0].token_ids, output.num_cached_tokens

    encoder = llm.engine.executor.worker.runner.images
    first, cached = ask(picture(1))
    assert cached == 0 and encoder.num_encoded == 1
    again, cached = ask(picture(1))
    assert again == first and cached >= 20 + 16 and encoder.num_encoded == 1
    other, cached = ask(picture(2))
    assert other != first and 16 <= cached <= 20, "text before an image is cached as text, another image never is"
    _, cached = ask(picture(1), 9)
    assert cached == 0 and encoder.num_encoded == 2, "the encoder's own cache serves it after other text"
    assert ask(picture(2))[0] == other


def test_several_images_and_text_share_a_batch(llm: LLM) -> None:
    prompts = [
        {"prompt_token_ids": [7, IMAGE, 8, IMAGE], "multi_modal_data": {"image": [picture(3), picture(4)]}},
        {"prompt_token_ids": [1, 2, 3]},
        {"prompt": "a<image>b", "multi_modal_data": {"image": picture(3)}},
    ]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    "prompt, message",
    [
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": Image.new("RGB", (8, 8))}}, "0 image placeholders"),
        ({"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": b"PNG"}}, "a PIL image"),
        ({"prompt_token_ids": [IMAGE], "multi_modal_data": {"video": [0]}}, "video"),
        ({"prompt_token_ids": [IMAGE], "multi_modal_data": {"audio": [0]}}, "audio"),
        ({"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": Image.new("RGB", (0, 5))}}, "0 x 5 pixels"),
    ],
)
def test_a_part_that_is_no_image_is_refused(llm: LLM, prompt: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_the_tower_can_be_left_out(folder: Path, llm: LLM) -> None:
    text = LLM(str(folder), dtype="float32", quantization="none", max_model_len=256, language_model_only=True)
    weights = [sum(one.engine.executor.weight_bytes.values()) for one in (llm, text)]
    assert weights[1] < weights[0]
    (ours,), (expected,) = (one.generate([[1, 2, 3]], GREEDY, use_tqdm=False) for one in (text, llm))
    assert ours.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(ValueError, match="language_model_only"):
        text.generate({"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": picture(1)}}, GREEDY, use_tqdm=False)


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    "how",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["ranks", "stages", "guesses"],
)
def test_answers_are_the_same_otherwise(folder: Path, llm: LLM, how: dict[str, Any]) -> None:
    prompts = [
        {"prompt_token_ids": [7, IMAGE, 8, IMAGE, 9], "multi_modal_data": {"image": [picture(3), picture(4)]}},
        {"prompt_token_ids": [1, 2, 3]},
    ]
    other = LLM(str(folder), dtype="float32", quantization="none", max_model_len=256, **how)
    sampled = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ours, expected = (one.generate(prompts, sampled, use_tqdm=False) for one in (other, llm))
    for output, same in zip(ours, expected, strict=True):
        assert output.outputs[0].token_ids == same.outputs[0].token_ids


def test_an_adapter_and_a_grammar_beside_an_image(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """The adapter changes the answer as weights with which it is merged do; the base's requests keep theirs."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    targets = r".*language_model.*(q_proj|v_proj|down_proj)"
    merged = save_adapter(tmp_path / "lora", model, 3, r=4, lora_alpha=8, target_modules=targets)
    shutil.copytree(folder, tmp_path / "merged")
    merged.save_pretrained(tmp_path / "merged")
    how: dict[str, Any] = {"dtype": "float32", "quantization": "none", "max_model_len": 256}
    adapted, reference = LLM(str(folder), enable_lora=True, **how), LLM(str(tmp_path / "merged"), **how)
    prompt = {"prompt_token_ids": [7, IMAGE, 8, 9], "multi_modal_data": {"image": picture(3)}}
    lora = LoRARequest("one", 1, str(tmp_path / "lora"))
    ours = adapted.generate([prompt, prompt], GREEDY, lora_request=[lora, None], use_tqdm=False)
    expected = [one.generate(prompt, GREEDY, use_tqdm=False)[0] for one in (reference, llm)]
    assert [one.outputs[0].token_ids for one in ours] == [one.outputs[0].token_ids for one in expected]
    assert ours[0].outputs[0].token_ids != ours[1].outputs[0].token_ids
    choice = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    (answer,) = llm.generate(prompt, choice, use_tqdm=False)
    assert answer.outputs[0].text in ("yes", "no")


def test_a_request_travels_to_the_core(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [7, IMAGE], "multi_modal_data": {"image": picture(3)}}
    request = llm._input.process("id", prompt, GREEDY)
    sent = msgspec.msgpack.Encoder().encode(request)
    assert msgspec.msgpack.Decoder(EngineCoreRequest).decode(sent).mm_items == request.mm_items


def test_tiles_are_encoded_one_a_step_beside_streams(tmp_path: Path) -> None:
    CASES["idefics3"].save(tmp_path)
    tokenizer, config = make_tokenizer(), json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_id": IMAGE}))
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(sizes))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    prompt = {"prompt_token_ids": [7, IMAGE, 8, 9], "multi_modal_data": {"image": picture(5, 60, 58)}}

    def ask(*before: dict[str, Any], **more: Any) -> tuple[list[int], list[int]]:
        """The answer to ``prompt``, and how many tiles each step encoded."""
        llm = LLM(str(tmp_path), dtype="float32", quantization="none", max_model_len=128, max_num_seqs=4, **more)
        encoder, counts = llm.engine.executor.worker.runner.images, list[int]()
        update = encoder.update

        def watched(step: Any) -> None:
            counts.append(len(step.encoder_inputs))
            update(step)

        encoder.update = watched
        params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * len(before)
        outputs = llm.generate([*before, prompt], [*params, GREEDY], use_tqdm=False)
        return outputs[-1].outputs[0].token_ids, [count for count in counts if count]

    alone, counts = ask(max_num_batched_tokens=64)
    assert counts == [5], "a tile in each quarter, and the whole"
    beside, counts = ask({"prompt_token_ids": list(range(16))}, max_num_batched_tokens=16)
    assert counts == [1] * 5 and beside == alone
