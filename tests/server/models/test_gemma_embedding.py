"""EmbeddingGemma from GGUF files ("gemma-embedding") and safetensors: vectors of transformers, dense layers included.

What all encoders promise is in test_encoders, drawn configurations in test_drawn_families.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from support.encoders import make_encoder, write_modules
from support.gguf_gemma import write_embedding_gemma
from transformers import PreTrainedModel

from octavo import LLM, PoolingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.worker.device import resolve_dtype

SETTINGS: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "max_position_embeddings": 256,
}
IDENTITY = "torch.nn.modules.linear.Identity"
PROMPTS: Any = [
    {"prompt_token_ids": [1, *[(7 * place + length) % 300 + 5 for place in range(length)], 2]}
    for length in (1, 2, 9, 17, 40, 64, 90, 120)
]


def dense() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(256, 192) / 14, torch.randn(192, 256) / 16]


def expected(model: PreTrainedModel, layers: list[torch.Tensor]) -> torch.Tensor:
    """Vectors by the arithmetic of sentence-transformers' modules: mean, two layers, length 1."""
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            vector = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
            for weight in layers:
                vector = weight @ vector
            found.append(torch.nn.functional.normalize(vector, dim=0))
    return torch.stack(found)


def vectors(llm: LLM, prompts: Any = PROMPTS, **params: Any) -> torch.Tensor:
    outputs = llm.embed(prompts, PoolingParams(**params), use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def checkpoint(folder: Path, **settings: Any) -> PreTrainedModel:
    model = make_encoder("embedding-gemma", folder, **SETTINGS | {"layer_types": None} | settings)
    sizes = [{"in_features": one.shape[1], "out_features": one.shape[0], "bias": False} for one in dense()]
    layers = [("Dense", size | {"activation_function": IDENTITY}) for size in sizes]
    write_modules(folder, ("Pooling", {"pooling_mode_mean_tokens": True}), *layers, ("Normalize", {}))
    for number, weight in enumerate(dense(), 2):
        save_file({"linear.weight": weight}, folder / f"{number}_Dense" / "model.safetensors")
    return model


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_vectors_pass_both_dense_layers_and_are_the_same_alone(form: str, tmp_path: Path) -> None:
    path = tmp_path
    if form == "safetensors":
        model = checkpoint(tmp_path)
    else:
        model = write_embedding_gemma(path := tmp_path / "m.gguf", SETTINGS, dense=dense())
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True)
    found, wanted = vectors(llm), expected(model, dense())
    assert torch.cosine_similarity(found, wanted).min() >= 0.99999
    assert torch.equal(found, torch.cat([vectors(llm, [prompt]) for prompt in PROMPTS]))
    cut = torch.nn.functional.normalize(wanted[:, :128], dim=1)
    assert torch.cosine_similarity(vectors(llm, dimensions=128), cut).min() >= 0.99999
    with pytest.raises(ValueError, match="dimensions must be one of 128, got 64"):
        vectors(llm, dimensions=64)


def test_an_odd_window_is_the_halved_one(tmp_path: Path) -> None:
    """As transformers wrote it for a while: 9 tokens of a side, of 16 that both have."""
    model = checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sliding_window"] == 16
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 9}))
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    assert torch.cosine_similarity(vectors(llm), expected(model, dense())).min() >= 0.99999


def test_a_file_without_dense_layers_is_refused_unless_a_pooling_is_given(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = write_embedding_gemma(path, SETTINGS)
    assert not any("dense" in tensor.name for tensor in GGUFReader(path).tensors)
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"lacks dense_2 or dense_3.*--embedding-pooling"):
        vectors(llm)
    assert torch.cosine_similarity(vectors(llm, pooling="mean"), expected(model, [])).min() >= 0.99999


@pytest.mark.parametrize("gone", ["modules.json", "2_Dense", "3_Dense"])
def test_a_folder_without_dense_layers_is_refused_unless_a_pooling_is_given(gone: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    if gone.endswith("json"):
        (tmp_path / gone).unlink()
    else:
        shutil.rmtree(tmp_path / gone)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=f"lacks {gone},.*fetch the whole model.*--embedding-pooling"):
        vectors(llm)
    assert torch.cosine_similarity(vectors(llm, pooling="mean"), expected(model, [])).min() >= 0.99999


def test_a_model_that_says_it_has_no_dense_layers_has_none(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    kept = [module for module in modules if not module["type"].endswith("Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(kept))
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    assert torch.cosine_similarity(vectors(llm), expected(model, [])).min() >= 0.99999


def test_float16_is_refused_and_not_chosen_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_embedding_gemma(path, SETTINGS, qtype="F16", dense=dense())
    gpu = torch.device("cuda")
    found = EngineArgs(model=str(path)).create_engine_config(progress=False)
    assert (found.model.dtype, resolve_dtype(found, gpu).model.dtype) == ("float16", "float32")
    asked = EngineArgs(model=str(path), dtype="float16").create_engine_config(progress=False)
    with pytest.raises(ConfigError, match=r"float16.*give bfloat16 or float32"):
        resolve_dtype(asked, gpu)
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert (llm.config.model.dtype, llm.config.model.weight_dtype) == ("float32", "float16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_bidirectional_attention": False}, "Gemma3TextModel is an encoder here"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "only Gemma3TextModel is built as one"),
    ],
)
def test_what_reads_to_one_side_is_no_encoder(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_texts_have_the_tokens_around_them_that_the_file_asks_for(tmp_path: Path) -> None:
    write_embedding_gemma(path := tmp_path / "m.gguf", SETTINGS, dense=dense())
    (output,) = LLM(str(path), dtype="float32").embed("the", use_tqdm=False)
    assert (output.prompt_token_ids[0], output.prompt_token_ids[-1]) == (1, 2)
