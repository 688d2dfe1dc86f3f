"""Embeddings are the model's own hidden states, whatever the prompt is cut into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.encoders import POOLED, weighted_mean

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.interface.pooling import Pooling
from octavo.interface.structured_output import StructuredOutputsParams


@pytest.mark.parametrize("pooling", POOLED)
def test_vectors_are_those_of_transformers(pooling: str, tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["qwen2"]
    prompts = [[5, 6, 7], list(range(3, 103)), [9]]
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True, long_prefill_token_threshold=7)
    whole = LLM(str(path), dtype="float32", skip_tokenizer_init=True)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    vectors = llm.embed(inputs, pooling=pooling)
    assert vectors == whole.embed(inputs, pooling=pooling), "the vector depends on chunks"
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(POOLED[pooling](hidden), dim=0)
        torch.testing.assert_close(torch.tensor(vector), expected, rtol=0, atol=1e-5)
    llm.engine.check_integrity()


@pytest.mark.parametrize("cut", [None, 20])
def test_chunks_without_a_prompt_and_of_several_poolings(cut: int | None, tiny_checkpoints: dict[str, Path]) -> None:
    """Of a cut text the beginning goes, and with it so much of the prompt that is left out."""
    path = tiny_checkpoints["qwen2"]
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True, long_prefill_token_threshold=7)
    ids = list(range(3, 33))
    kinds = ["cls", "weightedmean", "mean", "max"]
    pooling = Pooling("embed", "+".join(kinds), activate=False, left_out=12)
    request = llm._input.process_pooling("0", {"prompt_token_ids": ids}, pooling, truncate_prompt_tokens=cut)
    (output,) = llm._run([request], [None], False)
    kept, left_out = (ids, 12) if cut is None else (ids[-cut:], 2)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([kept])).last_hidden_state[0]
    wanted = [POOLED[kind](hidden[left_out:]) for kind in kinds]
    wanted[1] = weighted_mean(hidden, left_out)
    torch.testing.assert_close(torch.tensor(output.embedding), torch.cat(wanted), rtol=0, atol=1e-5)


def test_embeddings_and_text_share_a_batch(tiny_checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(tiny_checkpoints["llama"]), dtype="float32", skip_tokenizer_init=True)
    alone = llm.embed([5, 6, 7])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    text = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.embed([5, 6, 7]) == alone
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == text
    with pytest.raises(ValueError, match="pooling"):
        llm.embed([5], pooling="median")


def test_an_embedding_ends_beside_a_grammar() -> None:
    """Grammars mask the rows of logits: a pooled prompt has none."""
    llm = LLM(max_num_seqs=4, max_model_len=256, num_gpu_blocks_override=64)
    constraint = StructuredOutputsParams(regex="[a-z ]{5,20}")
    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs=constraint)
    free = SamplingParams(temperature=0, max_tokens=12)
    alone = llm.generate(["Say hi", "The capital"], [bound, free], use_tqdm=False)
    process = llm._input.process
    requests = [process("bound", "Say hi", bound), process("free", "The capital", free)]
    pooled = process("pooled", "hello world " * 100, SamplingParams(max_tokens=1))
    pooled.pooling = Pooling("embed", "mean")
    outputs = llm._run([*requests, pooled], [None] * 3, False)
    assert [output.error for output in outputs] == [None] * 3
    assert [o.outputs[0].token_ids for o in outputs[:2]] == [o.outputs[0].token_ids for o in alone]
    assert outputs[2].embedding == llm.embed("hello world " * 100)[0]


def test_requests_that_cannot_be_embedded_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoints: dict[str, Path]
) -> None:
    llm = LLM(str(tiny_checkpoints["llama"]), dtype="float32", skip_tokenizer_init=True)
    for layer in llm.engine.executor.worker.runner.model.model.layers:  # type: ignore[attr-defined]
        monkeypatch.setattr(layer, "finish", None)
    with pytest.raises(OctavoError, match="prompt 0"):
        llm.embed([5, 6, 7])
