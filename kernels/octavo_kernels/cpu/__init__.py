"""The CPU backend: C kernels for float32 and bfloat16; what they do not cover goes to plain torch."""

from __future__ import annotations

import torch

from octavo_kernels.cpu.attention import (
    attention_problem,
    copy_blocks,
    kv_scale_bytes,
    paged_attention,
    rope_and_cache,
)
from octavo_kernels.cpu.collectives import SharedMemory, create_shared_memory, shared_memory_bytes
from octavo_kernels.cpu.decode_step import DecodeInputs
from octavo_kernels.cpu.dense import dense_embedding, dense_linear, fill_dense
from octavo_kernels.cpu.drawing import REQUEST, Best, Drawing, Drawn, draw
from octavo_kernels.cpu.elementwise import (
    activate,
    add,
    argmax,
    embedding,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_,
    scale,
    silu_and_mul,
    take_columns,
)
from octavo_kernels.cpu.latent import latent_attention, latent_queries
from octavo_kernels.cpu.library import unavailable_reason
from octavo_kernels.cpu.lora import lora_expand_, lora_gather, lora_shrink, lora_tiles
from octavo_kernels.cpu.moe import fused_moe, topk_route
from octavo_kernels.cpu.prefault import Prefault
from octavo_kernels.cpu.quant import (
    gated_linear_quantize,
    pack_gguf,
    quantize_rows,
    quantized_embedding,
    quantized_head,
    quantized_linear,
    rms_norm_quantize,
    silu_and_mul_quantize,
)
from octavo_kernels.cpu.recording import Arena, Program, RecordingError, record
from octavo_kernels.cpu.recurrence import causal_conv, gated_conv, gated_delta_rule, gated_norm, state_space_scan
from octavo_kernels.cpu.streams import concat, match_rms_, mix_streams, sparsify_
from octavo_kernels.cpu.varlen import rope_, varlen_attention
from octavo_kernels.reference import (
    decode_inputs,
    group_dequantize,
    group_linear,
    group_row_counts,
    linear,
    moe_row_counts,
    quantize_tokens,
    sample,
    sample_part,
    scaled_linear,
    scaled_row_counts,
    top_logprobs,
)

CAPTURABLE = False


def unsupported_device_reason(device: torch.device) -> str | None:
    """Return why this backend cannot serve tensors on ``device``; None if it can."""
    return None if device.type == "cpu" else f"reads host memory, which tensors on {device.type!r} do not lie in"
