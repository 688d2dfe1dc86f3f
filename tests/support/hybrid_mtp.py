"""Random checkpoints of Qwen3.5 with their layer for multi-token prediction, and what that guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES
from support.tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel


class QwenOracle:
    """The layer in plain torch, with transformers' layer of attention in it; norms multiply by 1 + weight."""

    def __init__(self, model: PreTrainedModel, alone: PreTrainedModel) -> None:
        """``alone``: a model of such a layer."""
        self.main, self.head, self.own = model.model, model.lm_head, alone.model
        size, draw = alone.config.hidden_size, torch.Generator().manual_seed(5)
        self.tensors = {"fc": torch.randn(size, 2 * size, generator=draw) * 0.3}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.tensors |= {name: torch.rand(size, generator=draw) - 0.5 for name in norms}

    def as_ggml(self, layers: int) -> dict[str, Tensor]:
        """Its tensors behind a model's ``layers``, by llama.cpp's names of what transformers has none for."""
        names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
        names["norm"] = "shared_head_norm"
        found = {f"nextn.{names[name]}.weight": tensor for name, tensor in self.tensors.items()}
        found |= self.own.layers[0].state_dict()
        return {f"model.layers.{layers}.{name}": tensor for name, tensor in found.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.main.config.rms_norm_eps
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + self.tensors[name])

    def joined(self, tokens: list[int], before: Tensor) -> Tensor:
        """What the layer reads of ``tokens`` with the states before them."""
        embedded = self.norm(self.main.embed_tokens.weight[tokens], "pre_fc_norm_embedding")
        return torch.cat([embedded, self.norm(before, "pre_fc_norm_hidden")], -1) @ self.tensors["fc"].T

    def after(self, x: Tensor) -> Tensor:
        """What the layer makes of that, normed."""
        count = len(x)
        mask, places = torch.full((count, count), float("-inf")).triu(1)[None, None], torch.arange(count)[None]
        turned = self.own.rotary_emb(x[None], places)
        out = self.own.layers[0](x[None], attention_mask=mask, position_ids=places, position_embeddings=turned)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], "norm")

    @torch.inference_mode()
    def guesses(self, tokens: list[int], given: list[int]) -> list[Tensor]:
        """Logits [V] of the guesses after ``tokens``, where those before each are ``given``."""
        x = self.joined(tokens[1:], self.main(torch.tensor([tokens[:-1]])).last_hidden_state[0])
        found = list[Tensor]()
        for token in given:
            states = self.after(x)
            found.append(self.head(states[-1]))
            x = torch.cat([x, self.joined([token], states[-1:])])
        return found


def qwen_with_mtp(family: str, folder: Path, **settings: Any) -> QwenOracle:
    """Write a checkpoint of ``family`` with such a layer."""
    kind, own = FAMILY_CASES[family]
    model = make_model(kind, own | settings)
    model.save_pretrained(folder)
    return add_layer(folder, kind, own | settings, model)


def add_layer(folder: Path, kind: str, settings: dict[str, Any], model: PreTrainedModel) -> QwenOracle:
    """Add such a layer to the checkpoint of ``model``, or of one around it, with text of ``kind`` and ``settings``."""
    alone = make_model(kind, settings | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, seed=7)
    alone.save_pretrained(folder / "alone")  # as layers are stored, experts together
    oracle, tensors = QwenOracle(model, alone), load_file(folder / "model.safetensors")
    layer = load_file(folder / "alone" / "model.safetensors")
    tensors |= {name.replace("model.", "mtp.", 1): layer[name] for name in layer if ".layers.0." in name}
    tensors |= {f"mtp.{name}.weight": tensor for name, tensor in oracle.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return oracle
