"""Models of random numbers in the shapes of real ones: as a checkpoint, and as the GGUF file that llama.cpp reads.

Every model has SmolLM2's tokenizer, with names for the ids that it lacks, so that all are asked the same texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
SHARD_BYTES = 2 << 30
SHARED: dict[str, Any] = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
LLAMA_1B: dict[str, Any] = SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
QWEN3_0_6B: dict[str, Any] = SHARED | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
QWEN3_4B = QWEN3_0_6B | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
GPT_OSS_20B: dict[str, Any] = SHARED | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
EXPERT_SCALE = 121  # 2^-6: codes of up to 6 become weights of about 0.05


def write_checkpoint(config: dict[str, Any], tokenizer_of: Path, target: Path, last_norm: float = 1.0) -> None:
    """Write bfloat16 weights, experts of gpt-oss as released (MXFP4), in files of some 2 GiB.

    ``last_norm`` is the weight of the norm before the head: with 1, all tokens have nearly the same logit.
    """
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_of.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _name_all_ids(target / "tokenizer.json", config["vocab_size"])
    shards: list[dict[str, Any]] = [{}]
    files: dict[str, str] = {}
    held = 0

    def flush() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], target / name, {"format": "pt"})
        files.update(dict.fromkeys(shards[-1], name))

    for name, tensor in _tensors(config, last_norm):
        if held > SHARD_BYTES:
            flush()
            shards[-1], held = {}, 0
            shards.append({})
        shards[-1][name] = tensor
        held += tensor.nbytes
    flush()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _name_all_ids(path: Path, vocab_size: int) -> None:
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = len(set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]})
    vocabulary |= {f"more{i}": i for i in range(known, vocab_size)}
    path.write_text(json.dumps(tokenizer))


def _tensors(config: dict[str, Any], last_norm: float) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of the model that transformers makes of ``config``: norms but the last are ones, biases zeros,
    the rest is drawn."""
    import torch
    import transformers

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    of_type = transformers.AutoConfig.for_model(**plain)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(of_type)
    generator = torch.Generator().manual_seed(0)
    for name, meta in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name and "quantization_config" in config and not name.endswith("_bias"):
            experts, inputs, outputs = meta.shape
            codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            yield f"{name}_blocks", codes
            yield f"{name}_scales", torch.full_like(codes[..., 0], EXPERT_SCALE)
        elif "norm" in name:
            value = last_norm if name == "model.norm.weight" else 1.0
            yield name, torch.full(meta.shape, value, dtype=torch.bfloat16)
        elif name.endswith(("bias", "sinks")):
            yield name, torch.zeros(meta.shape, dtype=torch.bfloat16)
        else:
            yield name, torch.empty(meta.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Write the same numbers as llama.cpp's converter would store them; the tokens too."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    arch = config["model_type"].replace("_", "-")
    # The file is larger than memory should hold: tensors wait on the disk.
    writer = GGUFWriter(target, arch, use_temp_file=True)
    add_metadata(writer, config, checkpoint)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                for stored, values, kind in _as_gguf(config, arch, name, tensors.get_tensor(name)):
                    writer.add_tensor(stored, values, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)


def _as_gguf(config: dict[str, Any], arch: str, name: str, tensor: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, data and kind of what stands in the file for one tensor of a checkpoint."""
    import numpy as np
    import torch

    sys.path.insert(0, str(TESTS))
    try:
        from support.gguf_files import gguf_name, interleave
    finally:
        sys.path.remove(str(TESTS))
    if arch == "gpt-oss" and name.startswith("model.layers."):
        yield from _gpt_oss_as_gguf(name, tensor)
    elif tensor.ndim == 1:
        yield gguf_name(name, arch), tensor.float().numpy(), "F32"
    else:
        bits = tensor.view(torch.int16).numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            bits = interleave(bits, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        yield gguf_name(name, arch), np.ascontiguousarray(bits).view(np.uint8), "BF16"


def _gpt_oss_as_gguf(name: str, tensor: Any) -> Iterator[tuple[str, Any, str]]:
    import numpy as np
    import torch

    _, _, layer, part = name.split(".", 3)
    block = f"blk.{layer}."
    if part.startswith("mlp.experts."):
        kind = part.removeprefix("mlp.experts.")
        names = ("ffn_gate_exps", "ffn_up_exps") if kind.startswith("gate_up") else ("ffn_down_exps",)
        for i, stored in enumerate(names):
            own = tensor[:, i :: len(names)].contiguous()
            if kind.endswith("_bias"):
                yield f"{block}{stored}.bias", own.float().numpy(), "F32"
            elif kind.endswith("_blocks"):
                # A byte holds neighbours in a checkpoint, and codes that stand 16 apart in GGUF.
                codes = torch.stack((own & 15, own >> 4), -1).flatten(-2)
                bytes_ = codes[..., :16] | codes[..., 16:] << 4
                scales = torch.full_like(own[..., :1], EXPERT_SCALE)
                yield f"{block}{stored}.weight", torch.cat((scales, bytes_), -1).flatten(2).numpy(), "MXFP4"
        return
    names_of = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    base, _, kind = part.rpartition(".")
    stored = f"{block}{names_of[base]}.{'weight' if kind == 'sinks' else kind}"
    if tensor.ndim == 1 or base == "mlp.router":
        yield stored, tensor.float().numpy(), "F32"
    else:
        yield stored, np.ascontiguousarray(tensor.view(torch.int16).numpy()).view(np.uint8), "BF16"


def add_metadata(writer: Any, shape: dict[str, Any], tokenizer_of: Path) -> None:
    """Add what config.json tells in ``shape``, and the tokens and the chat template of a checkpoint's folder.

    Experts count as "num_experts" or "num_local_experts".
    """
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_vocab_size(shape["vocab_size"])
    if experts := shape.get("num_experts", shape.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(shape["num_experts_per_tok"])
    if scaling := shape.get("rope_scaling"):
        from gguf import RopeScalingType

        writer.add_expert_feed_forward_length(shape["intermediate_size"])
        writer.add_sliding_window(shape["sliding_window"])
        writer.add_rope_scaling_type(RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    add_tokens(writer, shape, tokenizer_of)


def add_tokens(writer: Any, shape: dict[str, Any], tokenizer_of: Path) -> None:
    """Add a folder's tokens, with names for the ids that it lacks, and its chat template."""
    tokenizer = json.loads((tokenizer_of / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()} | added
    tokens = [names.get(index, f"more{index}") for index in range(shape["vocab_size"])]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in added else 1 for index in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(shape["bos_token_id"])
    writer.add_eos_token_id(shape["eos_token_id"])
    writer.add_add_bos_token(False)
    if (template := tokenizer_of / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text())


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
