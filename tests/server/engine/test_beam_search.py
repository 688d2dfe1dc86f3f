"""`LLM.beam_search` against `generate(num_beams=...)` of transformers, over the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, BeamSearchParams, LoRARequest

PROMPTS = [[5, 17, 200, 31, 8, 9, 10], [7, 7, 301, 2, 90], [11] * 20]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("beams")
    config_class, settings = FAMILIES["llama"]
    model = make_model(config_class, settings | {"tie_word_embeddings": False})
    model.save_pretrained(folder / "model")
    adapted = save_adapter(folder / "a", model, 1, r=8, lora_alpha=64, target_modules="all-linear")
    return {"folder": folder, "model": model, "adapted": adapted}


def ends_of(model: Any) -> list[int]:
    """Two tokens that end an answer: such as come within the first steps of the search."""
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0, -1].topk(4).indices.tolist() for prompt in PROMPTS]
    return [rows[0][1], rows[1][2]]


def make_llm(made: dict[str, Any], ends: list[int], **options: Any) -> LLM:
    llm = LLM(str(made["folder"] / "model"), dtype="float32", skip_tokenizer_init=True, **options)
    llm._input.eos_token_ids = ends
    return llm


@pytest.fixture(scope="module")
def llm(made: dict[str, Any]) -> LLM:
    return make_llm(made, ends_of(made["model"]), enable_lora=True)


@torch.inference_mode()
def expected(model: Any, prompt: list[int], width: int, penalty: float, ends: list[int] | None) -> Any:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        max_new_tokens=9,
        do_sample=False,
        early_stopping=False,
        eos_token_id=ends,
        pad_token_id=319,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = []
    for row in found.sequences.tolist():
        ended = [i for i, token in enumerate(row) if i >= len(prompt) and ends and token in ends]
        rows.append(row[: ended[0] + 1] if ended else row)
    return rows, found.sequences_scores.tolist()


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), *((w, p) for w in (2, 4) for p in (1.0, 0.0, 2.0, -0.5))])
def test_answers_and_scores_are_those_of_transformers(
    made: dict[str, Any], llm: LLM, width: int, penalty: float
) -> None:
    """Where sequences end and where they do not; all prompts in one call."""
    for ends in (llm._input.eos_token_ids, None):
        params = BeamSearchParams(
            width, 9, length_penalty=penalty, ignore_eos=ends is None, include_stop_str_in_output=True
        )
        outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        reasons = {one.finish_reason for output in outputs for one in output.sequences}
        assert ("stop" in reasons) == bool(ends), "both kinds of end are seen"
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            if width == 1:  # which transformers decodes greedily, without scores
                rows, scores = greedy(made["model"], prompt, ends), None
            else:
                rows, scores = expected(made["model"], prompt, width, penalty, ends)
            assert [one.tokens for one in output.sequences] == rows
            for place, one in enumerate(output.sequences):
                length = len(one.tokens) - len(prompt)
                if scores is not None:
                    assert one.cum_logprob / length**penalty == pytest.approx(scores[place], abs=1e-4)
                told = [at[token].logprob for at, token in zip(one.logprobs, one.tokens[len(prompt) :], strict=True)]
                assert sum(told) == pytest.approx(one.cum_logprob, abs=1e-4)
                ended = bool(ends) and one.tokens[-1] in ends
                assert (one.finish_reason, one.stop_reason) == (("stop", one.tokens[-1]) if ended else ("length", None))
                assert ended or length == 9


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], ends: list[int] | None) -> list[list[int]]:
    ids = list(prompt)
    while len(ids) < len(prompt) + 9 and not (ends and len(ids) > len(prompt) and ids[-1] in ends):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return [ids]


def test_adapters_limits_of_prompts_and_the_token_that_ends(made: dict[str, Any], llm: LLM) -> None:
    params = BeamSearchParams(3, 9)
    asked = [None, LoRARequest("a", 1, str(made["folder"] / "a")), None]
    prompts = [PROMPTS[0]] * 3
    outputs = llm.beam_search(prompts, params, lora_request=asked, concurrency_limit=2)
    ends = llm._input.eos_token_ids
    for output, model in zip(outputs, (made["model"], made["adapted"], made["model"]), strict=True):
        rows, _ = expected(model, PROMPTS[0], 3, 1.0, ends)
        assert [one.tokens for one in output.sequences] == [row[:-1] if row[-1] in ends else row for row in rows]
    assert [one.lora_request for one in outputs[1].sequences] == [asked[1]] * 3
    assert llm.beam_search(PROMPTS[0], params)[0].sequences[0].tokens == outputs[0].sequences[0].tokens


def test_text_is_that_of_all_tokens(embedded_llm: LLM) -> None:
    (output,) = embedded_llm.beam_search("The capital of France is", BeamSearchParams(beam_width=3, max_tokens=6))
    best = output.sequences[0]
    assert len(output.sequences) == 3 and best.text is not None
    assert best.text == embedded_llm.get_tokenizer().decode(best.tokens, skip_special_tokens=True)
    assert best.text.startswith("The capital of France is") and "Paris" in best.text


@pytest.fixture(scope="module")
def embedded_llm() -> LLM:
    return LLM(max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64)


def test_what_cannot_be_searched_is_refused(made: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    for given, field in (
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10**6}, "beam_width"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
    ):
        with pytest.raises(ValueError, match=field):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **given})
    with pytest.raises(ValueError, match=r"max_tokens .* exceeds max_model_len"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(2, 10**6))
    with pytest.raises(ValueError, match="multi_modal_data"):
        llm.beam_search({"prompt_token_ids": [1], "multi_modal_data": {"image": object()}}, BeamSearchParams(2, 4))
    few = make_llm(made, [2], max_logprobs=3)
    with pytest.raises(ValueError, match="max_logprobs=4"):
        few.beam_search(PROMPTS[0], BeamSearchParams(2, 4))
