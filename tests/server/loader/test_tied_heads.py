"""A head and a table of tokens that are one load from either name; where the file has two, transformers decides."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.family_cases import FAMILY_CASES
from support.gguf_files import write_gguf
from support.paged import load, logits_of, model_config
from support.quantized_files import Writer, fp8, gptq, quantize_checkpoint
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import ModelError
from octavo.plan.measure import measure

TOKENS = [5, 17, 200, 3, 44, 9, 60, 17, 80]
TIED = ["llama-gqa-tied", "qwen3", "gemma2", "gemma3n", "gemma4", "gpt2", "opt", "opt-350m", "cohere", "phi4-mini"]
CODES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "fp8": (fp8(), {"quant_method": "fp8", "activation_scheme": "static"}),
}
LAYOUTS = ("table alone", "head alone", "both", "both, rounded", "two")


def names_of(folder: Path) -> tuple[str, str]:
    """The head's and the table's, as transformers calls them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ((head, table),) = model.all_tied_weights_keys.items()
    return head, table


def lay_out(folder: Path, layout: str, head: str = "lm_head.weight", table: str = "model.embed_tokens.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    (stored,) = {head, table} & set(tensors) or {name for name in tensors if table.endswith(name)}
    values = tensors.pop(stored)
    if layout != "head alone":
        tensors[stored] = values.to(torch.bfloat16).float() if layout == "both, rounded" else values
    if layout != "table alone":
        own = values.flip(0) if layout == "two" else values.clone()
        tensors[head] = own.to(torch.bfloat16) if layout == "both, rounded" else own
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", TIED)
def test_a_tied_model_is_read_as_transformers_reads_it(family: str, layout: str, tmp_path: Path, caplog) -> None:
    make_model(*FAMILY_CASES[family]).save_pretrained(tmp_path)
    lay_out(tmp_path, layout, *names_of(tmp_path))
    with caplog.at_level(logging.WARNING, "octavo"):
        found = logits_of(load(tmp_path), [TOKENS])[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert (found - model(torch.tensor([TOKENS])).logits[0]).abs().max() <= 1e-4
    assert ("tie_word_embeddings" in caplog.text) == (layout == "two")


def test_a_flag_that_says_two_is_held_against_the_file(tmp_path: Path) -> None:
    """A head that is not there is not made up."""
    make_model(*FAMILY_CASES["llama-gqa-tied"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"lacks tensor 'lm_head\.weight'"):
        load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["gptq", "fp8", "int8"])
def test_a_tied_model_in_codes_is_read_from_either_name(way: str, layout: str, tmp_path: Path) -> None:
    """Also where its head is made of the table's tensor in codes of its own."""
    folder = tmp_path / "model"
    sizes = {"tie_word_embeddings": True, "intermediate_size": 128}
    make_model("LlamaConfig", FAMILIES["llama"][1] | sizes).save_pretrained(folder)
    if way in CODES:
        folder = quantize_checkpoint(folder, tmp_path / way, *CODES[way])
    asked = None if way in CODES else way
    wanted = logits_of(load(folder, quantization=asked), [TOKENS])[0]
    lay_out(folder, layout)
    assert bool(model_config(folder, quantization=asked).hf_config["tie_word_embeddings"]) == (layout != "two")
    found = logits_of(load(folder, quantization=asked), [TOKENS])[0]
    assert torch.equal(found, wanted) == (layout not in ("two", "both, rounded"))


def test_a_head_in_codes_is_no_table(tmp_path: Path) -> None:
    make_model("LlamaConfig", FAMILIES["llama"][1] | {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight_scale"], tensors["lm_head.weight"] = torch.ones(1), torch.zeros(320, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert model_config(tmp_path).hf_config["tie_word_embeddings"] is False


@pytest.mark.parametrize("qtype", ["F32", "Q8_0"])
def test_a_gguf_file_with_the_head_alone_means_it_for_both(qtype: str, tmp_path: Path, monkeypatch) -> None:
    sizes = {"tie_word_embeddings": True, "intermediate_size": 128}
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | sizes)
    write_gguf(tmp_path / "table.gguf", model, arch="llama", qtype=qtype)
    monkeypatch.setitem(gguf_files.NAMES, "model.embed_tokens", "output")
    write_gguf(tmp_path / "head.gguf", model, arch="llama", qtype=qtype)
    table, head = (
        logits_of(load(tmp_path / f"{name}.gguf", quantization=None), [TOKENS])[0] for name in ("table", "head")
    )
    assert torch.equal(table, head)


def test_a_plan_knows_a_table_that_is_stored_as_the_head(tmp_path: Path) -> None:
    from octavo.engine.args import EngineArgs

    make_model("LlamaConfig", FAMILIES["llama"][1] | {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    lay_out(tmp_path, "head alone")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    config = EngineArgs(model=str(tmp_path)).create_engine_config(progress=False)
    planned = measure(replace(config, device="cpu"), 1)
    assert planned.weights == load(tmp_path).num_weight_bytes()


def test_an_adapters_copy_of_a_tied_head_is_compared_with_the_table(tmp_path: Path) -> None:
    make_model("LlamaConfig", FAMILIES["llama"][1] | {"tie_word_embeddings": True}).save_pretrained(tmp_path / "model")
    table = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    llm = LLM(str(tmp_path / "model"), dtype="float32", enable_lora=True, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=1)
    for number, copy in enumerate((table, table.flip(0))):
        path = tmp_path / f"adapter{number}"
        path.mkdir()
        name = "base_model.model.lm_head"
        matrices = {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(320, 2)}
        save_file({**matrices, f"{name}.base_layer.weight": copy.contiguous()}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
        request = LoRARequest(f"adapter{number}", 1, str(path))
        if number == 0:
            assert llm.generate({"prompt_token_ids": TOKENS}, params, lora_request=request, use_tqdm=False)
        else:
            with pytest.raises(ModelError, match="other values"):
                llm.generate({"prompt_token_ids": TOKENS}, params, lora_request=request, use_tqdm=False)
