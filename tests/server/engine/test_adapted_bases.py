"""LoRA adapters beside every family and every format of weights, against weights into which they were merged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import quantized_files as files
from support.adapters import save_adapter, write_adapter
from support.family_cases import FAMILY_CASES, FIRST_CASES
from support.hybrid_cases import HYBRID_CASES
from support.tiny_models import FAMILIES, make_model
from torch import nn
from transformers import AutoModelForCausalLM

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import ModelError

PROMPT = [5, 17, 200, 31, 8, 9, 10]
SETTINGS: dict[str, Any] = {"r": 4, "lora_alpha": 8}
# Linear layers that take no adapters; GPT-2's have their weights the other way round.
REFUSED = {"kv_b_proj": "kv_b_proj", r"altup\..*_coefs": "correction_coefs"}
WITHOUT = {"gpt2", *HYBRID_CASES}
CASES = [*sorted(set(FIRST_CASES.values()) - WITHOUT), "deepseek-v2"]  # the last one refuses all


@torch.inference_mode()
def differences(llm: LLM, adapter: Path, merged: Any) -> tuple[float, float]:
    """The largest one of a log-probability, and the mean divergence in nats, over a greedy answer."""
    size = merged.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=size)
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, params, lora_request=LoRARequest("one", 1, str(adapter)), use_tqdm=False
    )
    ids, largest, divergence = list(PROMPT), 0.0, 0.0
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        wanted = merged(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        found = torch.tensor([entry[i].logprob for i in range(size)])
        largest = max(largest, (wanted - found).abs().max().item())
        divergence += (wanted.exp() * (wanted - found)).sum().item() / 4
        ids.append(token)
    return largest, divergence


@pytest.mark.sampled(share=4)
@pytest.mark.parametrize("case", CASES)
def test_every_family_takes_adapters(case, tmp_path):
    """For every linear layer but experts, those that are refused apart: keys that are values too, parts of what is
    merged here, latent attention."""
    config_class, settings = FAMILY_CASES[case]
    model = make_model(config_class, settings)
    model.save_pretrained(tmp_path / "model")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    taken = [name for name in linear if not any(re.search(rf"{part}$", name) for part in REFUSED)]
    merged = save_adapter(tmp_path / "one", model, 1, target_modules="|".join(map(re.escape, taken)), **SETTINGS)
    llm = LLM(str(tmp_path / "model"), dtype="float32", enable_lora=True, skip_tokenizer_init=True, max_model_len=64)
    assert differences(llm, tmp_path / "one", merged)[0] <= 1e-4
    assert differences(llm, tmp_path / "one", model)[0] > 1e-3
    for part, said in REFUSED.items():
        some = [name for name in linear if re.search(rf"{part}$", name)][:1]
        if some:
            save_adapter(tmp_path / said, model, 1, target_modules="|".join(map(re.escape, some)), **SETTINGS)
            with pytest.raises(ModelError, match=f"train one without {said}"):
                differences(llm, tmp_path / said, model)


FORMATS: dict[str, tuple[files.Writer, dict[str, Any]]] = {
    "awq": (files.awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (
        files.gptq(4, 32, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "fp8": (files.fp8(), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "W4A16": files.compressed("pack-quantized", num_bits=4, symmetric=True, strategy="group", group_size=32),
    "bitsandbytes": (
        files.bitsandbytes_4bit(False, 64),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    config_class, settings = FAMILIES["llama"]
    folder = tmp_path_factory.mktemp("plain")
    make_model(config_class, settings | {"intermediate_size": 128}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_weights_may_be_stored_in_any_format(name, plain, tmp_path):
    """As exact as the weights where they are dequantised, as close as they are where codes are kept."""
    path = files.quantize_checkpoint(plain, tmp_path / "model", *FORMATS[name])
    merged = AutoModelForCausalLM.from_pretrained(path / "values", dtype=torch.float32).eval()
    shapes = {
        found: tuple(module.weight.shape)
        for found, module in merged.named_modules()
        if isinstance(module, nn.Linear) and found != "lm_head"
    }
    added = write_adapter(tmp_path / "one", shapes, 1, target_modules="all-linear", **SETTINGS)
    with torch.no_grad():
        for module, delta in added.items():
            merged.get_submodule(module).weight += delta
    options: dict[str, Any] = {"enable_lora": True, "skip_tokenizer_init": True, "max_model_len": 64}
    exact = LLM(str(path), dtype="float32", quantization="none", **options)
    assert differences(exact, tmp_path / "one", merged)[0] <= 1e-4
    llm = LLM(str(path), **options)
    assert differences(llm, tmp_path / "one", merged)[1] <= 5e-3
    assert llm.engine.executor.recording_obstacle is None
