"""Checkpoints in quantised formats, written as the formats' own tools write them, and their values as those read them.

Each writer turns a weight ``[N, K]`` into the tensors of one module and says which values they stand for. The values
are computed from the format's text, element by element where order matters, and not by what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]  # weight -> its tensors by leaf name, its values in float32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i]


def round_to_groups(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 [N, K], scales float16 [N, G] and zero points int64 [N, G] that are nearest to ``weight``."""
    rows, width = weight.shape
    grouped, top = weight.float().reshape(rows, -1, width if group == -1 else group), 2**bits - 1
    if symmetric:
        scales = (grouped.abs().amax(2) / (top // 2)).clamp(min=1e-5).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-5).half()
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = ((grouped / scales.float()[:, :, None]).round().long() + zeros[:, :, None]).clamp(0, top)
    return codes.reshape(rows, width), scales, zeros


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """``scale * (code - zero)`` in float32, with the group of each column int64 [K]."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def pack_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [r, c] as int32 [r, c * bits / 32]: the i-th ``bits`` of a word hold its column ``order[i]``."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for place, column in enumerate(order):
        out |= numbers[:, column::count].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


def awq(group: int, symmetric: bool = False) -> Writer:
    """AutoAWQ's gemm version."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = round_to_groups(weight, 4, group, symmetric)
        width = weight.shape[1]
        tensors = {
            "qweight": pack_words(codes.T.numpy(), 4, AWQ_ORDER),
            "qzeros": pack_words(zeros.T.numpy(), 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, values_of(codes, scales, zeros, torch.arange(width) // (width if group == -1 else group))

    return write


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, version: int = 1) -> Writer:
    """AutoGPTQ's (``version`` 1: zero points less one) or GPTQModel's second one."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        width = weight.shape[1]
        size = width if group == -1 else group
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else None
        groups = torch.arange(width) // size
        columns = torch.arange(width) if order is None else order
        codes, scales, zeros = round_to_groups(weight[:, columns], bits, group, symmetric)
        by_column, group_of = torch.empty_like(codes), torch.empty_like(groups)
        by_column[:, columns], group_of[columns] = codes, groups
        stored = (zeros - int(version == 1)) % 2**bits
        tensors = {
            "qweight": pack_words(by_column.numpy(), bits).T.contiguous(),
            "qzeros": pack_words(stored.T.numpy(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": group_of.int(),
        }
        return tensors, values_of(by_column, scales, zeros, group_of)

    return write


def fp8(per: str = "tensor", block: tuple[int, int] = (128, 128), name: str = "weight_scale") -> Writer:
    """e4m3 with a scale for the tensor, each row, or each block; ``name`` is the scales' own."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, width = weight.shape
        height, columns = {"tensor": (rows, width), "row": (1, width), "block": block}[per]
        of_row, of_column = torch.arange(rows) // height, torch.arange(width) // columns
        by_row = torch.zeros(int(of_row[-1]) + 1, width).index_reduce_(0, of_row, weight.abs(), "amax")
        scales = torch.zeros(len(by_row), int(of_column[-1]) + 1).index_reduce_(1, of_column, by_row, "amax") / 448
        spread = scales[of_row][:, of_column]
        stored = (weight / spread).to(torch.float8_e4m3fn)
        values = stored.float() * spread
        return {"weight": stored, name: scales.reshape(()) if per == "tensor" else scales}, values

    return write


def fp8_of_transformers() -> Writer:
    """A scale for the tensor and one for activations, as transformers saves FP8 without blocks (Ministral 3)."""
    write = fp8(name="weight_scale_inv")

    def write_both(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, values = write(weight)
        return tensors | {"activation_scale": torch.tensor(0.02)}, values

    return write_both


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _nearest_fp4(numbers: Tensor) -> Tensor:
    return (numbers[..., None] - torch.tensor(FP4)).abs().argmin(-1)


def _bytes_of(codes: Tensor) -> Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def mxfp4(codes_name: str = "weight_blocks", scales_name: str = "weight_scales", by_block: bool = True) -> Writer:
    """gpt-oss' blocks of 16 bytes, or flat ones, with exponents."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = weight.unflatten(1, (-1, 32))
        exponents = (grouped.abs().amax(2) / 6).log2().ceil().clamp(-127, 127)
        codes = _nearest_fp4(grouped * 2.0 ** -exponents[:, :, None]).flatten(1)
        blocks = _bytes_of(codes)
        values = torch.tensor(FP4)[codes] * (2.0**exponents).repeat_interleave(32, 1)
        return {
            codes_name: blocks.unflatten(1, (-1, 16)) if by_block else blocks,
            scales_name: (exponents + 127).to(torch.uint8),
        }, values

    return write


def nvfp4(codes_name: str = "weight", of_tensor: str = "weight_scale_2", reciprocal: bool = False) -> Writer:
    """ModelOpt's, or (``reciprocal``) compressed-tensors'."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (6 * 448)
        stored = (grouped.abs().amax(2) / 6 / whole).clamp(min=2**-6).to(torch.float8_e4m3fn)
        kept = (1 / whole if reciprocal else whole).reshape(1)
        scales = stored.float() / kept if reciprocal else stored.float() * kept
        codes = _nearest_fp4(grouped / scales[:, :, None]).flatten(1)
        values = torch.tensor(FP4)[codes] * scales.repeat_interleave(16, 1)
        return {codes_name: _bytes_of(codes), "weight_scale": stored, of_tensor: kept}, values

    return write


NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


_BNB_FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]


def bitsandbytes_4bit(nested: bool, block: int = 32, kind: str = "nf4") -> Writer:
    """NF4 or FP4 in flat blocks; with ``nested`` the scales are in 8 bits themselves."""
    numbers = NF4 if kind == "nf4" else _BNB_FP4 + [-number for number in _BNB_FP4]

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        table, blocks = torch.tensor(numbers), weight.reshape(-1, block)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "shape": list(weight.shape)}
        tensors: Tensors = {"weight.quant_map": table}
        if nested:
            offset, of_scales = scales.mean().item(), torch.linspace(-1, 1, 256)
            away = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
            largest = away.abs().amax(1)
            places = (away / largest[:, None])[..., None].sub(of_scales).abs().argmin(-1).flatten()[: len(scales)]
            scales = of_scales[places] * largest.repeat_interleave(256)[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": of_scales}
        codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1)
        flat = codes.flatten()
        said = json.dumps(state).encode()
        tensors |= {
            "weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None],
            "weight.absmax": places.to(torch.uint8) if nested else scales,
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(said), dtype=torch.uint8),
        }
        return tensors, (table[codes] * scales[:, None]).reshape(weight.shape)

    return write


def bitsandbytes_8bit(weight: Tensor) -> tuple[Tensors, Tensor]:
    """INT8 by rows."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, codes.float() * (
        largest / 127
    )[:, None]


def compressed(format_: str, act_order: bool = False, **weights: Any) -> tuple[Writer, dict[str, Any]]:
    """A writer that lets compressed-tensors compress, and what config.json says of it. ``weights`` are its
    QuantizationArgs. ``act_order``: the columns are compressed in another order, as old versions could."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format_)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, width = weight.shape
        order = torch.arange(width)
        if act_order:
            order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        size = args.group_size or width
        grouped = weight[:, order].reshape(1 if args.strategy == "tensor" else rows, -1, size if size > 0 else width)
        if args.strategy == "tensor":
            grouped = grouped.flatten(1)[:, None]
        scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
        scale = scale.bfloat16()
        parts = {"weight": weight[:, order].bfloat16(), "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(parts, scheme)
        values = compressor.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, scheme)["weight"]
        rounded = compressor.decompress(stored, scheme)["weight"]
        assert torch.equal(values.to(rounded.dtype), rounded), "what the library itself gives, in the scales' dtype"
        if act_order:
            stored["weight_g_idx"] = torch.empty(width, dtype=torch.int32)
            stored["weight_g_idx"][order] = (torch.arange(width) // size).int()
            unordered = torch.empty_like(values)
            unordered[:, order] = values
            values = unordered
            raw = _unpack_words(stored["weight_packed"], args.num_bits)
            by_column = torch.empty_like(raw)
            by_column[:, order] = raw
            stored["weight_packed"] = pack_words(by_column.numpy(), args.num_bits)
        return stored, values.float()

    description = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }
    return write, description


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_words`, of consecutive columns: int64."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[:, :, None] & 0xFFFFFFFF) >> shifts & (2**bits - 1)).flatten(1)


def quantize_checkpoint(
    source: Path, target: Path, write: Writer | dict[str, Writer | None], description: dict[str, Any], **config: Any
) -> Path:
    """Copy the checkpoint at ``source``, its decoder's linear weights written by ``write`` (or by that of ``{part of a
    name: writer}``; None: left plain). Beside it, in ``target``/values, lies the plain checkpoint of their values."""
    writers = write if isinstance(write, dict) else {"_proj": write, ".fc": write}
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        writer = next((w for part, w in writers.items() if part in name and "layers." in name), None)
        if writer is None or not name.endswith(".weight") or tensor.ndim != 2:
            continue
        del stored[name]
        leaves, plain[name] = writer(tensor)
        stored |= {name.removesuffix("weight") + leaf: value for leaf, value in leaves.items()}
    values = target / "values"
    values.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | config
    for folder, tensors, more in ((target, stored, {"quantization_config": description}), (values, plain, {})):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
    return target


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gpt_oss_as_released() -> tuple[dict[str, Any], Tensors]:
    """gpt-oss of two layers, all weights 0: experts in MXFP4, stacked, gates and ups in turn."""
    hidden, inner, experts, queries, vocab = 1024, 1024, 8, 16 * 64, 4096
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "head_dim": 64,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
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
    tensors = {"model.embed_tokens.weight": torch.zeros(vocab, hidden), "lm_head.weight": torch.zeros(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    rows = {"q_proj": queries, "k_proj": 512, "v_proj": 512, "o_proj": hidden}
    for layer in range(2):
        own = {f"self_attn.{name}.weight": torch.zeros(count, 1024) for name, count in rows.items()}
        own |= {f"self_attn.{name}.bias": torch.zeros(count) for name, count in rows.items()}
        own |= {"self_attn.sinks": torch.zeros(16), "mlp.router.weight": torch.zeros(experts, hidden)}
        own |= {f"{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        own |= {"mlp.router.bias": torch.zeros(experts)}
        for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
            own |= {f"mlp.experts.{name}_blocks": blocks, f"mlp.experts.{name}_bias": torch.zeros(experts, outputs)}
            own[f"mlp.experts.{name}_scales"] = torch.full_like(blocks[..., 0], 124)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return config, {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


def embedded_checkpoint(folder: Path) -> Path:
    """The embedded model as a plain checkpoint in float32, tokenizer included."""
    from octavo.engine.args import EngineArgs
    from octavo.loader.checkpoint import iterate_weights

    config = EngineArgs(dtype="float32").create_engine_config(progress=False).model
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: source.load(torch.float32).contiguous() for name, source in iterate_weights(config.files)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.hf_config | {"dtype": "float32", "torch_dtype": "float32"}))
    for file in config.files.tokenizer_path.glob("*.json*"):
        if file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


# How SmolLM2 is quantised: its widths (576, 1536) are multiples of 64, not of 128. name -> writer, description
RECIPES: dict[str, Callable[[], tuple[Writer, dict[str, Any]]]] = {
    "awq": lambda: (
        awq(64),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    ),
    "gptq": lambda: (
        gptq(group=64),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False},
    ),
    "gptq-act-order": lambda: (
        gptq(group=64, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True},
    ),
    "w8a8": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8": lambda: (fp8("row"), compressed("float-quantized", num_bits=8, type="float", strategy="channel")[1]),
    "mxfp4": lambda: (mxfp4(), {"quant_method": "mxfp4"}),
    "nvfp4": lambda: (nvfp4(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": lambda: (
        bitsandbytes_4bit(nested=True, block=64),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}
# vLLM refuses int8 checkpoints that do not say how activations are quantised.
DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def quantized_smollm2(folder: Path, recipe: str, plain: Path, dtype: str = "float32") -> Path:
    """The embedded model, of which ``plain`` is the checkpoint in float32, quantised by a recipe, at ``folder``."""
    write, description = RECIPES[recipe]()
    if recipe == "w8a8":
        description["config_groups"]["group_0"]["input_activations"] = DYNAMIC_INT8
    quantize_checkpoint(plain, folder, write, description, torch_dtype=dtype, dtype=dtype)
    for file in plain.glob("*.json*"):
        if file.name != "config.json":
            for target in (folder, folder / "values"):
                (target / file.name).write_bytes(file.read_bytes())
    return folder
