"""EmbeddingGemma: Gemma 3's layers, in which every token sees the text to both sides."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.embedding_gemma import Gemma3TextConfig
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.encoder import EncoderInputs, NormedEncoderAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.encoder import Encoder


class _Layer(nn.Module):
    """Norms before and behind attention and the MLP."""

    def __init__(self, model: Gemma3TextModel, number: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        text, tp = model.text, model.tp
        self.input_layernorm = model.create_norm(text.hidden_size)
        self.self_attn = NormedEncoderAttention(
            model.config, tp, text.attention_bias, rotary, text.window(number), norm=model.create_norm
        )
        self.self_attn.scale = text.query_pre_attn_scalar**-0.5
        self.post_attention_layernorm = model.create_norm(text.hidden_size)
        self.pre_feedforward_layernorm = model.create_norm(text.hidden_size)
        self.mlp = GatedMLP(text.hidden_size, text.intermediate_size, False, text.act, tp)
        self.post_feedforward_layernorm = model.create_norm(text.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, inputs: EncoderInputs) -> tuple[Tensor, Tensor]:
        """Hidden states are ``residual + x``, a sum that the next norm makes."""
        x, residual = self.input_layernorm(x, residual)
        x, _ = self.post_attention_layernorm(self.self_attn(x, inputs))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        x, _ = self.post_feedforward_layernorm(self.mlp(x))
        return x, cast(Tensor, residual)


class Gemma3TextModel(Encoder):
    """See the module."""

    text: Gemma3TextConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"(^|\.)rotary_emb\w*\.|^lm_head\.", None),
        (r"^model\.", ""),
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        # Rounded to the model's dtype, as the embeddings are.
        dtype = getattr(torch, config.dtype)
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        kinds = self.text.kinds
        rotary = {kind: RotaryEmbedding(config, None, self.text.rope(kind)) for kind in sorted(set(kinds))}
        self.layers = nn.ModuleList(_Layer(self, number, rotary[kind]) for number, kind in enumerate(kinds))
        self.norm = self.create_norm(config.hidden_size)

    def create_norm(self, size: int) -> RMSNorm:
        """A norm, whose weight checkpoints hold less 1; GGUF files hold all of it."""
        return RMSNorm(size, self.text.rms_norm_eps, 0.0 if self.config.files.format == "gguf" else 1.0)

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """See `Encoder`."""
        x, residual = octavo_kernels.scale(self.embed_tokens(inputs.input_ids), self.embedding_scale), None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs)
        normed: Tensor = self.norm(x, residual)[0]
        return normed
