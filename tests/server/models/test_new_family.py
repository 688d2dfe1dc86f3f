"""New families without a change to what is shared: one that differs from Llama in names and an activation takes at most
40 lines and everything works for it, one with other wiring writes its layer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import new_family, parallel_family
from support.paged import load, logits_of, model_config
from support.tiny_models import FAMILIES, VOCAB_SIZE, make_model
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.interface import architectures
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, weight_size

SETTINGS = FAMILIES["llama"][1] | {"hidden_act": "gelu", "tie_word_embeddings": False}
OTHER_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    ("input_layernorm.", "ln_1."),
    ("post_attention_layernorm.", "ln_2."),
    ("self_attn.", "attn."),
    ("mlp.", "ffn."),
    ("_proj.", "."),
    ("lm_head.", "head."),
)
TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [7]]


@pytest.fixture
def reference(tmp_path: Path) -> PreTrainedModel:
    model = make_model("LlamaConfig", SETTINGS)
    model.save_pretrained(tmp_path / "llama")
    return model


@pytest.fixture
def sprout(reference: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model as its makers would have saved it."""
    monkeypatch.setitem(architectures.MODELS, "SproutForCausalLM", "sprout")
    monkeypatch.setitem(sys.modules, "octavo.models.sprout", new_family)
    folder = tmp_path / "sprout"
    folder.mkdir()
    tensors = {"transformer.h.0.attn.causal_mask": torch.ones(8, 8)}
    for name, tensor in load_file(tmp_path / "llama" / "model.safetensors").items():
        for ours, theirs in OTHER_NAMES:
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    assert not any("_proj" in name or name.startswith("model.") for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    del config["hidden_act"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["SproutForCausalLM"]}))
    return folder


def test_it_takes_few_lines() -> None:
    assert len(Path(new_family.__file__).read_text().splitlines()) <= 40


def test_its_logits_are_those_of_transformers(sprout: Path, reference: PreTrainedModel) -> None:
    for chunk in (1 << 30, 2):
        for tokens, ours in zip(TOKENS, logits_of(load(sprout), TOKENS, chunk), strict=True):
            with torch.inference_mode():
                expected = reference(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_it_is_quantised_as_any_other(sprout: Path) -> None:
    models = [
        load_model(replace(model_config(path), quantization="int8")) for path in (sprout, sprout.parent / "llama")
    ]
    ours, theirs = (logits_of(model, TOKENS) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    config = replace(model_config(sprout), quantization="int8")
    size = weight_size(model_without_memory(config, "cpu"), stored_weights(config))
    assert size.nbytes == models[0].num_weight_bytes()


def test_an_engine_runs_it(sprout: Path, reference: PreTrainedModel) -> None:
    options = {"skip_tokenizer_init": True, "dtype": "float32", "quantization": "none", "max_model_len": 64}
    llm = LLM(str(sprout), max_num_seqs=2, num_gpu_blocks_override=16, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS[0]}], params, use_tqdm=False)
    expected = reference.generate(torch.tensor(TOKENS[:1]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == expected[0, len(TOKENS[0]) :].tolist()


def test_missing_and_surplus_tensors_are_named(sprout: Path) -> None:
    path = sprout / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"transformer.h.0.attn.sinks": torch.ones(4)}, path)
    with pytest.raises(ModelError, match=r"no place for tensor 'transformer\.h\.0\.attn\.sinks'"):
        load(sprout)
    del tensors["transformer.h.1.ffn.up.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"lacks tensor 'transformer\.h\.1\.ffn\.up\.weight'"):
        load(sprout)


def test_blocks_may_be_wired_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and MLP side by side, against transformers; the stack and its cut are those of all families."""
    monkeypatch.setitem(architectures.MODELS, "ParallelForCausalLM", "parallel")
    monkeypatch.setitem(sys.modules, "octavo.models.parallel", parallel_family)
    monkeypatch.setitem(sys.modules, "octavo.interface.model_config.parallel", parallel_family)
    heads, size = 4, 16
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": heads * size,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "intermediate_size": 112,
        "max_position_embeddings": 128,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
    reference = make_model("GPTNeoXConfig", settings)
    tensors = {}
    for name, tensor in reference.state_dict().items():
        name = name.replace("gpt_neox.", "model.").replace("embed_in", "embed_tokens").replace("embed_out", "lm_head")
        name = name.replace("final_layer_norm", "norm").replace("attention.dense.", "self_attn.o_proj.")
        name = name.replace("dense_h_to_4h", "fc1").replace("dense_4h_to_h", "fc2")
        if "query_key_value" in name:
            parts = tensor.view(heads, 3, size, *tensor.shape[1:]).unbind(1)
            for letter, part in zip("qkv", parts, strict=True):
                own = name.replace("attention.query_key_value", f"self_attn.{letter}_proj")
                tensors[own] = part.reshape(-1, *tensor.shape[1:]).contiguous()
        elif "inv_freq" not in name:
            tensors[name] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads(reference.config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ParallelForCausalLM"]}))
    model = load(tmp_path)
    at_once = logits_of(model, TOKENS)
    for tokens, ours in zip(TOKENS, at_once, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert all(torch.equal(a, b) for a, b in zip(at_once, logits_of(model, TOKENS, 2), strict=True))
