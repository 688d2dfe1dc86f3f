"""Parts of encoders: attention to both sides over whole sequences, without a KV cache.

Layers work on the tokens of several sequences, one after the other in one tensor: nothing is padded, and every row of a
result depends on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.linear import QKVParallelLinear, QKVRows, RowParallelLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weights import WeightSlot, copy_slot


@dataclass
class EncoderInputs:
    """The tokens of S whole sequences, one after the other: T rows, those of padding last."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], from 0
    token_types: Tensor  # int64 [T]: 1 in the second text of a pair
    query_start_loc: Tensor  # int32 [S + 1]: where each sequence begins
    seq_lens: Tensor  # int32 [S]


class EncoderAttention(nn.Module):
    """Query, key and value projections, attention and the output projection of one layer.

    ``window``: a token sees those less than so many away on both sides (None: all). ``rotary`` None: positions come
    with the embeddings. ``rows``: how the checkpoint stores the projections. Scores are multiplied by ``scale``.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        bias: bool,
        rotary: RotaryEmbedding | None = None,
        window: int | None = None,
        rows: QKVRows = QKVRows(),
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        heads, size = config.num_heads, config.head_size
        self.head_size, self.window, self.rotary, self.scale = size, window, rotary, size**-0.5
        self.qkv_proj = QKVParallelLinear(config.hidden_size, size, heads, config.num_kv_heads, bias, tp, rows)
        self.o_proj = RowParallelLinear(heads * size, config.hidden_size, bias if out_bias is None else out_bias, tp)

    def forward(self, x: Tensor, inputs: EncoderInputs) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        qkv, heads, kv_heads = self.qkv_proj(x), self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.norm_heads_(qkv)
        if self.rotary is not None:
            table = self.rotary.cos_sin_cache
            octavo_kernels.rope_(qkv, inputs.positions, table, heads + kv_heads, self.head_size)
        starts, lengths = inputs.query_start_loc, inputs.seq_lens
        attended = octavo_kernels.varlen_attention(
            qkv, starts, lengths, heads, kv_heads, self.head_size, self.scale, self.window
        )
        out: Tensor = self.o_proj(attended)
        return out

    def norm_heads_(self, qkv: Tensor) -> None:
        """Norm queries and keys in place, where the family does."""


class NormedEncoderAttention(EncoderAttention):
    """`EncoderAttention` that norms each head of queries and keys; ``norm`` makes a norm of so many elements."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        bias: bool,
        rotary: RotaryEmbedding | None,
        window: int | None,
        *,
        norm: Callable[[int], RMSNorm],
    ) -> None:
        super().__init__(config, tp, bias, rotary, window)
        self.q_norm, self.k_norm = norm(self.head_size), norm(self.head_size)

    def norm_heads_(self, qkv: Tensor) -> None:
        """See `EncoderAttention`."""
        first = 0
        for norm, heads in ((self.q_norm, self.qkv_proj.num_heads), (self.k_norm, self.qkv_proj.num_kv_heads)):
            behind = first + heads * self.head_size
            octavo_kernels.rms_norm_(qkv[:, first:behind], norm.weight, norm.eps)
            first = behind


class PostNormEncoderLayer(nn.Module):
    """Norms of the sums behind attention and behind the MLP, as in BERT."""

    def __init__(
        self, attention: EncoderAttention, attention_norm: LayerNorm, mlp: nn.Module, output_norm: LayerNorm
    ) -> None:
        super().__init__()
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.output_norm = mlp, output_norm

    def forward(self, x: Tensor, inputs: EncoderInputs) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        x, _ = self.attention_norm(self.attention(x, inputs), x)
        out: Tensor = self.output_norm(self.mlp(x), x)[0]
        return out


class HeadLinear(nn.Module):
    """A linear layer for one row a sequence: in float32, and each row's result depends on that row alone on a CPU.

    Heads are small, and what they say is the answer itself: they are never quantised.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size, dtype=torch.float32), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x [S, input_size]``; returns float32 ``[S, output_size]``."""
        rows = -(-len(x) // _ROWS) * _ROWS
        padded = nn.functional.pad(x.float(), (0, 0, 0, rows - len(x)))
        return octavo_kernels.linear(padded, self.weight, self.bias)[: len(x)]

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight and the bias, as they are stored."""
        for leaf, param in self.named_parameters():
            yield copy_slot(leaf, param)


class HeadNorm(nn.Module):
    """A LayerNorm of one row a sequence, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [S, size]``; returns float32 ``[S, size]``."""
        return nn.functional.layer_norm(x.float(), self.weight.shape, self.weight, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight and the bias, as they are stored."""
        for leaf, param in self.named_parameters():
            yield copy_slot(leaf, param)


_ROWS = 8  # of which torch's float32 GEMM on a CPU gives the same bits in any number
