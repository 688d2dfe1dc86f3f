"""Triton kernels, made for NVIDIA Hopper; without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1).

Launch shapes of attention and their reasons are in ``attention_configs.py``. Operations without a Triton kernel use the
reference backend's plain torch, which runs on any device.
"""

from __future__ import annotations

import torch
import triton

from octavo_kernels.reference import (
    add,
    causal_conv,
    concat,
    dense_embedding,
    dense_linear,
    gated_conv,
    gated_delta_rule,
    gated_linear_quantize,
    gated_norm,
    match_rms_,
    mix_streams,
    quantize_rows,
    quantized_embedding,
    quantized_linear,
    rms_norm_quantize,
    silu_and_mul_quantize,
    sparsify_,
    state_space_scan,
    take_columns,
)
from octavo_kernels.triton.activation import activate
from octavo_kernels.triton.attention import attention_problem, paged_attention
from octavo_kernels.triton.block_copies import copy_blocks
from octavo_kernels.triton.decode_step import decode_inputs
from octavo_kernels.triton.elementwise import (
    embedding,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_,
    scale,
    silu_and_mul,
)
from octavo_kernels.triton.group_weight import group_dequantize, group_linear, group_row_counts
from octavo_kernels.triton.latent import latent_attention, latent_queries
from octavo_kernels.triton.lora import lora_expand_, lora_gather, lora_shrink, lora_tiles
from octavo_kernels.triton.moe import fused_moe, moe_row_counts
from octavo_kernels.triton.moe_route import topk_route
from octavo_kernels.triton.rope import rope_, rope_and_cache
from octavo_kernels.triton.sampling import sample, sample_part, top_logprobs
from octavo_kernels.triton.scaled_weight import quantize_tokens, scaled_linear, scaled_row_counts
from octavo_kernels.triton.small_linear import linear
from octavo_kernels.triton.varlen import varlen_attention

INTERPRETED = bool(triton.knobs.runtime.interpret)  # Triton decides when a kernel is defined: when this is imported
LEAST_CAPABILITY = (8, 0)  # the oldest for which Triton has tensor cores' bfloat16
CAPTURABLE = not INTERPRETED  # the interpreter runs on the host


def unavailable_reason() -> str | None:
    """Explain why these kernels cannot run here; None if they can."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "there is no CUDA device; TRITON_INTERPRET=1 runs the kernels in Triton's interpreter (slow, for tests)"


def unsupported_device_reason(device: torch.device) -> str | None:
    """Explain why these kernels cannot serve tensors on ``device``; None if they can."""
    if INTERPRETED:
        return None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= LEAST_CAPABILITY:
            return None
        least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"runs on GPUs of compute capability {least} or newer (A100, A10, L4, H100 ...), and this one has {own}"
    return f"runs on CUDA devices, not on {device.type!r}, unless TRITON_INTERPRET=1 (slow, for tests)"
