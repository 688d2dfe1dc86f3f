"""gpt-oss as it is released: experts in MXFP4, their biases apart, everything else in 16 bits."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES
from support.gguf_files import NAMES, add_byte_level_vocabulary, write_metadata
from support.paged import load, logits_of, model_config
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.loader.load_model import load_model

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
TOKENS = [random.Random(0).randrange(VOCAB_SIZE) for _ in range(60)]


def released(folder: Path) -> Any:
    """A tiny checkpoint in MXFP4; returns transformers' model of the values that it stands for."""
    config_class, settings = FAMILY_CASES["gpt-oss"]
    model = make_model(config_class, settings | {"hidden_size": 64, "intermediate_size": 96})
    model.save_pretrained(folder)
    g, tensors = torch.Generator().manual_seed(3), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=g, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # the low half of a byte first
        values = E2M1[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        model.get_parameter(name).data.copy_(values.flatten(-2).transpose(1, 2))
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(torch.bfloat16)
            model.get_parameter(name).data.copy_(tensors[name].float())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return model


@torch.inference_mode()
def transformers_logits(model: Any) -> torch.Tensor:
    return model(torch.tensor([TOKENS])).logits[0]


def test_mxfp4_experts_have_the_values_of_the_file(tmp_path: Path) -> None:
    expected = transformers_logits(released(tmp_path))
    exact = logits_of(load(tmp_path), [TOKENS])[0]
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))

    check_packed(tmp_path, expected, 0.1)  # the others are rounded to 8 bits, which such narrow random layers feel


def check_packed(path: Path, expected: torch.Tensor, limit: float) -> None:
    """Without a flag: codes of four bits, and their logits."""
    packed = load_model(replace(model_config(path, "float32"), quantization=None))
    kinds = packed.weight_bytes_by_kind()
    experts = 2 * 6 * 3 * 64 * 96  # layers, experts, projections, sizes
    assert experts / 2 < kinds["table4 experts"] < experts * 0.75, f"{kinds}: four bits an element, scales, padding"
    rounded = logits_of(packed, [TOKENS])[0]
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < limit


GGUF = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn": "attn_sinks",
}


def write_gguf(path: Path, model: Any) -> None:
    """As llama.cpp lays it out: experts in MXFP4, gates and ups apart."""
    config, rope = model.config, model.config.rope_parameters

    def fill(writer: GGUFWriter) -> None:
        add_byte_level_vocabulary(writer, config.vocab_size, "gpt-4o")
        for name, tensor in model.state_dict().items():
            values, kind = tensor.numpy(), name.rpartition(".")[2]
            layer = re.match(r"model\.layers\.(\d+)\.(.*)\.\w+$", name)
            if "experts" not in name:
                own = f"blk.{layer[1]}.{GGUF[layer[2]]}" if layer else GGUF[name.rpartition(".")[0]]
                writer.add_tensor(f"{own}.{'weight' if kind == 'sinks' else kind}", values)
                continue
            assert layer is not None
            for part in ("gate", "up") if "gate_up" in name else ("down",):
                own = f"blk.{layer[1]}.ffn_{part}_exps"
                taken = values[..., slice(int(part == "up"), None, 1 if part == "down" else 2)]
                if kind.endswith("bias"):
                    writer.add_tensor(f"{own}.bias", np.ascontiguousarray(taken))
                    continue
                mxfp4 = GGMLQuantizationType.MXFP4
                blocks = quants.quantize(np.ascontiguousarray(taken.swapaxes(1, 2)), mxfp4)
                writer.add_tensor(f"{own}.weight", blocks, raw_dtype=mxfp4)
                taken[:] = quants.dequantize(blocks, mxfp4).swapaxes(1, 2)  # into the model, too

    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": config.head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    write_metadata(path, "gpt-oss", {f"gpt-oss.{key}": value for key, value in values.items()}, fill)


def test_a_gguf_file_has_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    config_class, settings = FAMILY_CASES["gpt-oss"]
    model = make_model(config_class, settings | {"hidden_size": 64, "intermediate_size": 96})
    write_gguf(tmp_path / "m.gguf", model)
    expected = transformers_logits(model)
    exact = logits_of(load(tmp_path / "m.gguf"), [TOKENS])
    torch.testing.assert_close(exact[0], expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))
    check_packed(tmp_path / "m.gguf", expected, 5e-3)


def test_a_step_with_mxfp4_experts_is_recorded(tmp_path: Path) -> None:
    released(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_num_seqs=4, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    runner = llm.engine.executor.worker.runner.device_runner  # type: ignore[attr-defined]
    assert len(outputs[0].outputs[0].token_ids) == 4 and runner.recorded_steps.can_record


def test_another_activation_is_refused(tmp_path: Path) -> None:
    make_model(*FAMILY_CASES["gpt-oss"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value in (("swiglu_alpha", 1.5), ("swiglu_limit", -1)):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ModelError, match=field):
            load(tmp_path)
