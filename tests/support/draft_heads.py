"""Random draft heads in the formats that they come in, and what they guess, in plain torch from the papers' words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

HEADS, KV_HEADS, MIDDLE = 4, 2, 72
FORMATS = ("released", "vllm", "speculators")


@dataclass
class Head:
    """A head for ``target``. ``taps``: the layers whose inputs an EAGLE-3 head reads (none: it is of EAGLE-1)."""

    target: PreTrainedModel
    taps: tuple[int, ...] = ()
    layers: int = 1
    draft_vocab: int = 0  # 0: the whole one
    own_embedding: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    flags: tuple[str, ...] = ()  # norm_before_residual, norm_before_fc, fc_norm, norm_output
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        config, draw = self.target.config, torch.Generator().manual_seed(self.seed)
        self.size, self.vocab = config.hidden_size, config.vocab_size
        self.dim, self.eps, self.count = self.size // HEADS, 1e-6, len(self.taps)
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (self.size, self.size * (self.count or 2))}
        if self.fc_bias:
            shapes["fc.bias"] = (self.size,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab, self.size)
        for layer in range(self.layers):
            width = self.size * (2 if self.taps and layer == 0 else 1)
            own = {
                "self_attn.q_proj": (HEADS * self.dim, width), "self_attn.k_proj": (KV_HEADS * self.dim, width),
                "self_attn.v_proj": (KV_HEADS * self.dim, width), "self_attn.o_proj": (self.size, HEADS * self.dim),
                "mlp.gate_proj": (MIDDLE, self.size), "mlp.up_proj": (MIDDLE, self.size),
                "mlp.down_proj": (self.size, MIDDLE), "post_attention_layernorm": (self.size,),
            }  # fmt: skip
            own |= {"input_layernorm": (self.size,)} if self.taps or layer else {}
            own |= {"hidden_norm": (self.size,)} if self.taps and not layer else {}
            own |= {f"self_attn.{one}_norm": (self.dim,) for one in "qk"} if self.qk_norm else {}
            shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if self.taps:
            rows = self.draft_vocab or self.vocab
            shapes |= {"norm.weight": (self.size,), "lm_head.weight": (rows, self.size)}
            shapes |= {"input_norm.weight": (self.count * self.size,)} if "norm_before_fc" in self.flags else {}
            each = range(self.count if "fc_norm" in self.flags else 0)
            shapes |= {f"fc_norm.{i}.weight": (self.size,) for i in each}
        self.tensors = {
            name: torch.rand(shape, generator=draw) + 0.5
            if "norm" in name
            else torch.randn(shape, generator=draw) * shape[-1] ** -0.5
            for name, shape in shapes.items()
        }
        if self.draft_vocab:
            tokens = torch.randperm(self.vocab, generator=draw)[: self.draft_vocab].sort().values
            self.tensors["d2t"] = tokens - torch.arange(self.draft_vocab)
            self.tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, tokens, True)

    @property
    def method(self) -> str:
        return "eagle3" if self.taps else "eagle"

    def save(self, folder: Path, form: str = "vllm") -> dict[str, Any]:
        """Returns the speculative_config that asks for it."""
        fields: dict[str, Any] = {
            "hidden_size": self.size, "vocab_size": self.vocab, "intermediate_size": MIDDLE, "rms_norm_eps": self.eps,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": self.layers,
            "max_position_embeddings": 64, "rope_theta": 10000.0,  # fewer than the target's
        }  # fmt: skip
        if self.qk_norm:
            fields["head_dim"] = self.dim
        own: dict[str, Any] = dict.fromkeys(self.flags, True)
        if self.taps:
            own |= {
                "draft_vocab_size": self.draft_vocab or self.vocab,
                "eagle_aux_hidden_state_layer_ids": [*self.taps],
            }
        plain = "Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"
        if form == "speculators":
            fields["model_type"] = "qwen3" if self.qk_norm else "llama"
            config = {"speculators_model_type": self.method, "transformer_layer_config": fields, **own}
            config |= {"architectures": ["Eagle3DraftModel"], "speculators_config": {"algorithm": self.method}}
        else:
            name = f"Eagle{'3' * bool(self.taps)}{plain}" if form == "vllm" else plain
            config = {"architectures": [name], **fields, **own}
        names = {name: name for name in self.tensors}
        if form == "released" and self.taps and self.layers == 1:
            names = {name: name.replace("layers.0.", "midlayer.") for name in names}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {names[name]: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return {"method": self.method, "model": str(folder)}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _rotate(self, x: Tensor) -> Tensor:
        """Of [heads, T, dim]."""
        angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(0, self.dim, 2) / self.dim)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        count = len(x)
        q, k, v = (self._linear(x, f"{name}.{one}_proj").view(count, -1, self.dim) for one in "qkv")
        if self.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k, v = self._rotate(q.transpose(0, 1)), self._rotate(k.transpose(0, 1)), v.transpose(0, 1)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
        scores = q @ k.transpose(1, 2) / self.dim**0.5 + torch.full((count, count), float("-inf")).triu(1)
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _states(self, embedded: Tensor, before: Tensor) -> Tensor:
        """After all layers, from the tokens' embeddings and the states before them, [T, H] each."""
        x = before if self.taps else self._linear(torch.cat([embedded, before], -1), "fc")
        for layer in range(self.layers):
            name, residual = f"layers.{layer}", x
            if self.taps and layer == 0:
                normed = self._norm(x, f"{name}.hidden_norm")
                residual = normed if "norm_before_residual" in self.flags else x
                x = torch.cat([self._norm(embedded, f"{name}.input_layernorm"), normed], -1)
            elif layer:
                x = self._norm(x, f"{name}.input_layernorm")
            x = residual + self._attention(x, f"{name}.self_attn")
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate = F.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._norm(x, "norm") if "norm_output" in self.flags else x

    def _read(self, tokens: list[int]) -> Tensor:
        """The states that the target's step leaves."""
        outputs = list[Tensor]()
        hooks = [
            layer.register_forward_hook(lambda _, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
            for layer in self.target.model.layers
        ]
        out = self.target.model(torch.tensor([tokens]), output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        if not self.taps:
            return out.last_hidden_state[0]
        read = [(outputs[tap - 1] if tap else out.hidden_states[0])[0] for tap in self.taps]
        if "fc_norm" in self.flags:
            read = [self._norm(one, f"fc_norm.{i}") for i, one in enumerate(read)]
        joined = torch.cat(read, -1)
        return self._linear(self._norm(joined, "input_norm") if "norm_before_fc" in self.flags else joined, "fc")

    def logits(self, state: Tensor) -> Tensor:
        """Of the vocabulary, [V]."""
        if not self.taps:
            return self.target.lm_head(state)
        state = state if "norm_output" in self.flags else self._norm(state, "norm")
        own = self.tensors["lm_head.weight"] @ state
        if not self.draft_vocab:
            return own
        places = torch.arange(self.draft_vocab) + self.tensors["d2t"]
        return torch.full((self.vocab,), float("-inf")).index_put((places,), own)

    @torch.inference_mode()
    def guesses(self, tokens: list[int], given: list[int]) -> list[Tensor]:
        """Logits [V] of the guesses after ``tokens``, where those before each are ``given``."""
        before, tokens, found = self._read(tokens[:-1]), list(tokens), list[Tensor]()
        own = self.tensors.get("embed_tokens.weight")
        table = self.target.get_input_embeddings().weight if own is None else own
        for token in given:
            states = self._states(table[tokens[1:]], before)
            found.append(self.logits(states[-1]))
            tokens.append(token)
            before = torch.cat([before, states[-1:]])
        return found
