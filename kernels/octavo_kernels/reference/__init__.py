"""Plain torch versions of every kernel: slow, short and obviously right. The other backends are tested against them."""

from __future__ import annotations

import torch

from octavo_kernels.reference.attention import copy_blocks, paged_attention, rope_and_cache
from octavo_kernels.reference.decode_step import decode_inputs
from octavo_kernels.reference.dense import dense_embedding, dense_linear
from octavo_kernels.reference.elementwise import (
    activate,
    add,
    embedding,
    fused_add_rms_norm,
    layer_norm,
    linear,
    rms_norm,
    rms_norm_,
    scale,
    silu_and_mul,
    take_columns,
)
from octavo_kernels.reference.group_weight import group_dequantize, group_linear, group_row_counts
from octavo_kernels.reference.latent import latent_attention, latent_queries
from octavo_kernels.reference.lora import lora_expand_, lora_gather, lora_shrink, lora_tiles
from octavo_kernels.reference.moe import fused_moe, moe_row_counts, topk_route
from octavo_kernels.reference.quant import (
    gated_linear_quantize,
    quantize_rows,
    quantized_embedding,
    quantized_linear,
    rms_norm_quantize,
    silu_and_mul_quantize,
)
from octavo_kernels.reference.recurrence import causal_conv, gated_conv, gated_delta_rule, gated_norm, state_space_scan
from octavo_kernels.reference.sampling import sample, sample_part, top_logprobs
from octavo_kernels.reference.scaled_weight import quantize_tokens, scaled_linear, scaled_row_counts
from octavo_kernels.reference.streams import concat, match_rms_, mix_streams, sparsify_
from octavo_kernels.reference.varlen import rope_, varlen_attention

CAPTURABLE = False  # lengths and slots are read on the host


def unavailable_reason() -> str | None:
    """Return None: this backend can always run."""
    return None


def unsupported_device_reason(device: torch.device) -> str | None:
    """Return None: this backend serves all devices."""
    return None


def attention_problem(block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int) -> str | None:
    """Explain why these shapes and dtypes are not supported, beginning with the name of one; None if they are."""
    return "kv_cache_dtype: only the C kernels of a CPU have an int8 cache" if kv_dtype == torch.int8 else None
