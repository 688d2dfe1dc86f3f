"""The kernels of the engine: one interface, several backends.

Every function here takes torch tensors and calls the function of the same name in a backend module: ``reference``
(plain torch, which defines the results), ``cpu`` (C) or ``triton`` (CUDA). The device of the tensors decides which one,
unless `select_backend` or the environment variable ``OCTAVO_KERNEL_BACKEND`` names one.

Shapes: T rows (tokens) of a step, H hidden size, Hq query heads, Hkv key/value heads, D head size. The KV cache of one
layer is a tensor ``[2, num_blocks, Hkv, block_size, D]``: index 0 holds keys, 1 holds values. An int8 one has
`kv_scale_bytes` more than D. It may be a view of memory in which the layers of a block lie beside each other.

In float32 every row of a result depends on that row's own data only: not on the number of rows, chunks or requests in
the step, the block size or the number of threads. For ``linear``, which is torch's, this holds on CPUs only and for T a
multiple of 8: the order of cuBLAS's sums depends on T.
"""

from __future__ import annotations

from octavo_kernels.attention_metadata import AttentionMetadata, DecodeStep
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.dense import DenseWeight
from octavo_kernels.dispatch import (
    BackendUnavailableError,
    attention_problem,
    available_backends,
    backend_name,
    can_be_captured,
    check_device,
    kv_scale_bytes,
    select_backend,
)
from octavo_kernels.group_weight import GroupWeight
from octavo_kernels.lora import AdapterTable, RowTiles, SlotMemory, SlotTable
from octavo_kernels.moe import Experts, ExpertTable, StackedWeight
from octavo_kernels.operations.attention import (
    copy_blocks,
    decode_inputs,
    latent_attention,
    latent_queries,
    paged_attention,
    rope_,
    rope_and_cache,
    varlen_attention,
)
from octavo_kernels.operations.elementwise import (
    activate,
    add,
    concat,
    fused_add_rms_norm,
    layer_norm,
    match_rms_,
    mix_streams,
    rms_norm,
    rms_norm_,
    scale,
    silu_and_mul,
    sparsify_,
    take_columns,
)
from octavo_kernels.operations.experts import (
    fused_moe,
    moe_row_counts,
    topk_route,
)
from octavo_kernels.operations.linear import (
    dense_embedding,
    dense_linear,
    embedding,
    group_dequantize,
    group_linear,
    group_row_counts,
    linear,
    quantize_tokens,
    scaled_linear,
    scaled_row_counts,
)
from octavo_kernels.operations.lora import (
    lora_expand_,
    lora_gather,
    lora_shrink,
    lora_tiles,
)
from octavo_kernels.operations.quantized import (
    gated_linear_quantize,
    quantize_rows,
    quantized_embedding,
    quantized_linear,
    rms_norm_quantize,
    silu_and_mul_quantize,
)
from octavo_kernels.operations.recurrence import causal_conv, gated_conv, gated_delta_rule, gated_norm, state_space_scan
from octavo_kernels.operations.sampling import (
    sample,
    sample_part,
    top_logprobs,
)
from octavo_kernels.quant import PackedLinear, QuantizedRows
from octavo_kernels.recurrence import LayerState, StateMetadata
from octavo_kernels.sampling_rows import Constraints, SampledRows, SamplingRows, SamplingTable
from octavo_kernels.scaled_weight import ScaledWeight
