"""LoRA adapters in the files that PEFT writes, and the weights that merging makes of them, in plain torch."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo import LoRARequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_adapter(path: Path, shapes: Mapping[str, tuple[int, int]], seed: int, **settings: Any) -> dict[str, Tensor]:
    """Write a random adapter for modules with weights of these ``shapes`` [outputs, inputs]; those of embeddings
    ("embed_tokens") are [ids, width]. ``settings`` are those of PEFT's LoraConfig.

    Returns what is to be added to each weight. It is large enough to change most tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for module, (outputs, inputs) in shapes.items():
        rank = _of_pattern(settings.get("rank_pattern", {}), module, settings["r"])
        alpha = _of_pattern(settings.get("alpha_pattern", {}), module, settings["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        name = f"base_model.model.{module}"
        embedding = module.endswith("embed_tokens")
        a = torch.randn(rank, outputs if embedding else inputs, generator=generator) * 0.1
        b = torch.randn(inputs if embedding else outputs, rank, generator=generator) * 0.1
        kind = "lora_embedding_{}" if embedding else "lora_{}.weight"
        tensors |= {f"{name}.{kind.format('A')}": a, f"{name}.{kind.format('B')}": b}
        added[module] = ((b @ a).T if embedding else b @ a) * scaling
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "none"} | settings))
    return added


def save_adapter(path: Path, model: PreTrainedModel, seed: int, **settings: Any) -> PreTrainedModel:
    """Write a random adapter of ``model``; returns the model with what it adds merged into its weights."""
    targets = settings["target_modules"]
    shapes = {}
    for name, module in model.named_modules():
        kinds = nn.Linear if targets == "all-linear" else nn.Linear | nn.Embedding
        if isinstance(module, kinds) and _is_target(targets, name):
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, added in write_adapter(path, shapes, seed, **settings).items():
            merged.get_submodule(name).weight += added
    return merged.eval()


def _is_target(targets: str | list[str], name: str) -> bool:
    if targets == "all-linear":
        return name != "lm_head"
    return bool(re.fullmatch(targets, name)) if isinstance(targets, str) else name.endswith(tuple(targets))


def _of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def write_adapters(folder: str, vocab_size: int) -> list[LoRARequest | None]:
    """None, and four for models of two layers of 1,024 (Qwen3), of unlike ranks and layers."""
    sizes = {"q_proj": (2048, 1024), "v_proj": (1024, 1024), "o_proj": (1024, 2048)}
    layers = {f"model.layers.{i}.self_attn.{name}": size for i in (0, 1) for name, size in sizes.items()}
    ends = {"model.embed_tokens": (vocab_size, 1024), "lm_head": (vocab_size, 1024)}
    found: list[LoRARequest | None] = [None]
    for i, shapes in enumerate((layers, ends, layers | ends, {"model.layers.1.mlp.down_proj": (1024, 3072)})):
        path = Path(folder, f"{i}")
        write_adapter(path, shapes, i, r=3 * (i + 1), lora_alpha=8, target_modules="all-linear")
        found.append(LoRARequest(f"{i}", i + 1, str(path)))
    return found
