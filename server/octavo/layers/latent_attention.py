"""Multi-head latent attention (DeepSeek V2, V3): keys and values of all heads are made of one latent a token.

The cache holds latents and rotary keys alone. Keys and values are never made: what would make keys of a latent is
multiplied into the queries instead, what would make values into the sums of latents, of prompts, too.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.model_config.deepseek import DeepseekConfig
from octavo.layers.attention import ForwardContext
from octavo.layers.linear import RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.quantization.dense import DenseLinearMethod
from octavo.layers.quantization.unquantized import UnquantizedLinearMethod
from octavo.layers.rotary import RotaryEmbedding

_LATENT_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


class _Projection(LinearBase):
    """Outputs ``rows`` of a weight, whose rows the checkpoint holds in another ``order`` (see `Shard`)."""

    def __init__(
        self, shape: tuple[int, int], rows: slice, bias: bool, tp: TensorParallel, order: Tensor | None = None
    ) -> None:
        super().__init__([Shard(shape, rows, slice(0, shape[1]), 0, order)], bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, columns]``; returns ``[T, rows]``."""
        return self.product(x, self.bias)


class LatentSelfAttention(nn.Module):
    """Projections, cache and attention of one layer, with this rank's heads; latents are whole on every rank.

    ``interleaved``: the checkpoint's rotary elements are turned in pairs of neighbours.
    """

    has_cache: ClassVar[bool] = True  # as in `Attention`

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, rotary: RotaryEmbedding, interleaved: bool
    ) -> None:
        super().__init__()
        text, hidden = config.text_of(DeepseekConfig), config.hidden_size
        self.layer, self.rotary, self.dtype = layer, rotary, getattr(torch, config.dtype)
        self.group = 0  # as in `Attention`
        self.latent_size, self.rotary_size = text.kv_lora_rank, config.head_size
        self.key_size, self.value_size = text.qk_nope_head_dim, text.v_head_dim
        self.num_heads = tp.divide(config.num_heads, "num_attention_heads")
        size, bias = self.key_size + self.rotary_size, text.attention_bias
        heads = slice(tp.rank * self.num_heads, (tp.rank + 1) * self.num_heads)
        self.scale = size**-0.5 * _stretch(text.rope()) ** 2

        def of_heads(width: int) -> slice:
            return slice(heads.start * width, heads.stop * width)

        rank = text.q_lora_rank
        order = _halves(config.num_heads, self.key_size, self.rotary_size) if interleaved else None
        queries = (config.num_heads * size, rank or hidden)
        if rank:
            self.q_a_proj = _Projection((rank, hidden), slice(0, rank), bias, tp)
            self.q_a_layernorm = RMSNorm(rank, _LATENT_EPS)
            self.q_b_proj = _Projection(queries, of_heads(size), False, tp, order)
        else:
            self.q_proj = _Projection(queries, of_heads(size), False, tp, order)
        kept = self.latent_size + self.rotary_size
        order = _halves(1, self.latent_size, self.rotary_size) if interleaved else None
        self.kv_a_proj_with_mqa = _Projection((kept, hidden), slice(0, kept), bias, tp, order)
        self.kv_a_layernorm = RMSNorm(self.latent_size, _LATENT_EPS)
        made = self.key_size + self.value_size
        shape = (config.num_heads * made, self.latent_size)
        self.kv_b_proj: _Projection | None = _Projection(shape, of_heads(made), False, tp)
        self.o_proj = RowParallelLinear(config.num_heads * self.value_size, hidden, bias, tp)
        # [Hq, key_size, L] and [Hq, L, value_size]: `kv_b_proj` in two parts, see `absorb`.
        self.register_parameter("key_weight", None)
        self.register_parameter("value_weight", None)

    def absorb(self) -> None:
        """Take over what `kv_b_proj` was loaded with, however it is stored, and let go of it."""
        assert self.kv_b_proj is not None
        device = next(self.kv_a_layernorm.parameters()).device
        made = self.kv_b_proj(torch.eye(self.latent_size, dtype=self.dtype, device=device)).view(
            self.latent_size, self.num_heads, -1
        )
        made = made.to(self._absorbed_dtype(device.type == "cpu"))
        keys, values = made.split([self.key_size, self.value_size], dim=-1)
        self.key_weight = nn.Parameter(keys.permute(1, 2, 0).contiguous(), requires_grad=False)
        self.value_weight = nn.Parameter(values.transpose(0, 1).contiguous(), requires_grad=False)
        self.kv_b_proj = None

    def absorbed_bytes(self, on_cpu: bool) -> int:
        """The bytes that the parts will take together, known before anything is loaded."""
        made: int = self.num_heads * (self.key_size + self.value_size) * self.latent_size
        return made * self._absorbed_dtype(on_cpu).itemsize

    def _absorbed_dtype(self, on_cpu: bool) -> torch.dtype:
        """The dtype of the parts: on a CPU, weights stored in 16 bits stay so; on a GPU they have the dtype of
        activations."""
        assert self.kv_b_proj is not None
        is_plain = isinstance(self.kv_b_proj.method, DenseLinearMethod | UnquantizedLinearMethod)
        return torch.bfloat16 if on_cpu and is_plain and self.kv_b_proj.stored_types == ["BF16"] else self.dtype

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return all heads' outputs for ``x [T, H]``, ``[T, Hq value_size]``, before ``o_proj``."""
        if hasattr(self, "q_b_proj"):
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))[0])
        else:
            q = self.q_proj(x)
        kv_cache, metadata = ctx.kv_caches[self.layer], ctx.metadata[self.group]
        queries = octavo_kernels.latent_queries(
            q.view(-1, self.num_heads, self.key_size + self.rotary_size),
            self.kv_a_proj_with_mqa(x),
            positions,
            self.rotary.cos_sin_cache,
            kv_cache,
            metadata.slot_mapping,
            self.key_weight,
            self.kv_a_layernorm.weight,
            _LATENT_EPS,
        )
        out = octavo_kernels.latent_attention(queries, kv_cache, metadata, self.scale, self.value_weight)
        return out.view(-1, self.num_heads * self.value_size)

    def kv_cache_spec(self, dtype: str) -> KVCacheSpec:
        """This layer's KV cache for each token, in the model's ``dtype``."""
        return KVCacheSpec(1, self.latent_size + self.rotary_size, dtype, kind="mla")


def absorb_weights(model: nn.Module) -> None:
    """`LatentSelfAttention.absorb` in all layers of a loaded model."""
    for module in list(model.modules()):
        if isinstance(module, LatentSelfAttention):
            module.absorb()


def _stretch(parameters: dict[str, object]) -> float:
    """Return the factor by which YaRN's ``mscale_all_dim`` multiplies queries, and keys."""
    weight, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters["rope_type"] == "default" or not weight:
        return 1.0
    if not isinstance(weight, (int, float)) or not isinstance(factor, (int, float)):
        raise ModelError("config.json: rope parameters with mscale_all_dim need a factor, a number; correct the file")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _halves(heads: int, plain: int, turned: int) -> Tensor:
    """The stored rows of ``heads`` of ``plain + turned`` rows each in the kernels' order: first elements of pairs of
    turned ones, then second ones."""
    pairs = torch.arange(plain, plain + turned, device="cpu").view(-1, 2).T.flatten()
    rows = torch.cat([torch.arange(plain, device="cpu"), pairs])
    return (torch.arange(heads, device="cpu")[:, None] * (plain + turned) + rows).flatten()
