"""Decoders that give vectors, classes and scores: Qwen3-Embedding, Qwen3-Reranker, heads of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.encoders import write_modules, write_tokenizer
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, PoolingParams, SamplingParams
from octavo.errors import ModelError

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9]]
TEMPLATE = (
    "{{ 'is ' + (messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first) + ' of ' + "
    "(messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first) }}"
)


def qwen3(path: Path) -> Any:
    model = make_model(*FAMILIES["qwen3"])
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_head_of_classes_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    config_class, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings | {"num_labels": 3})
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    outputs = llm.classify(
        [{"prompt_token_ids": p} for p in PROMPTS], PoolingParams(use_activation=False), use_tqdm=False
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot generate text: it gives scores and classes"):
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_decoder_pools_as_its_modules_say(tmp_path: Path) -> None:
    model = qwen3(tmp_path)
    write_modules(tmp_path, ("Pooling", {"pooling_mode_lasttoken": True}), ("Normalize", {}))
    llm = LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=32, max_num_seqs=4, num_gpu_blocks_override=64)
    for prompt, output in zip(
        PROMPTS, llm.embed([{"prompt_token_ids": p} for p in PROMPTS], use_tqdm=False), strict=True
    ):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("said_by", ["modules", "overrides", "name"])
def test_a_reranker_answers_yes_or_no(said_by: str, tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Qwen3-Reranker" if said_by == "name" else tmp_path / "tiny"
    model = qwen3(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
    yes, no = LLM(str(path), **options).get_tokenizer().convert_tokens_to_ids(["yes", "no"])
    if said_by == "modules":
        write_modules(path, ("LogitScore", {"true_token_id": yes, "false_token_id": no}))
    elif said_by == "overrides":  # as vLLM's documentation says it
        options["hf_overrides"] = {
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        }
    llm = LLM(str(path), **options)
    documents = ["france", "{query} a cat", "paris " * 30]
    scores = llm.score("paris", documents, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for document, output in zip(documents, scores, strict=True):
        ids = tokenizer.encode(f"is paris of {document}", add_special_tokens=False)
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(torch.sigmoid(logits[yes] - logits[no]).item(), abs=1e-5)
    cut = llm.score("paris", documents[2], truncate_prompt_tokens=12, use_tqdm=False)[0].prompt_token_ids
    assert cut == tokenizer.encode("is paris of " + "paris " * 9, add_special_tokens=False)
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be above 3"):
        llm.score("paris", documents[2], truncate_prompt_tokens=3, use_tqdm=False)


def test_answers_that_the_vocabulary_lacks_are_refused(tmp_path: Path) -> None:
    qwen3(tmp_path)
    with pytest.raises(ModelError, match="lacks the answer 'maybe'"):
        LLM(str(tmp_path), dtype="float32", hf_overrides={"classifier_from_token": ["no", "maybe"]})
