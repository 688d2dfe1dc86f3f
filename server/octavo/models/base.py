"""The interface of models to the engine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_layout import KVCacheGroup
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.state_spec import StateSpec
from octavo.layers.attention import Attention, ForwardContext
from octavo.layers.decoder import Decoder, DeferredHidden
from octavo.layers.embedding import PackedTable, ParallelLMHead
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.moe import FusedMoE
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import ExpertsBase, LinearBase, kind_of
from octavo.layers.quantization.packed_method import PackedMethod
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod
from octavo.layers.weights import Transposed, WeightSource, experts_apart
from octavo_kernels import SampledRows, SamplingRows

# On a CPU torch's float32 GEMM, which runs where there are no C kernels, gives a row the same bits for every number of
# rows that is a multiple of 8, not below 8. cuBLAS promises nothing of the kind.
GEMM_ROW_MULTIPLE = 8


class Model(nn.Module):
    """The interface of every model to the loader and the memory ledger: where a checkpoint's tensors go, and their
    sizes.

    A weight's name is the path of its module here, with the names of `packed_modules_mapping` in place of a merged
    module's, and the tensor's own ("model.layers.0.self_attn.q_proj.weight").
    """

    # Module -> the checkpoint's modules that it holds one after the other.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # From a checkpoint's names to those above: regular expressions and what replaces each match (None: the tensor is
    # left out), applied one after the other. Families put their own before these.
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        # Tables that old checkpoints carry along although they follow from config.json.
        (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.rope_freqs\.weight$", None),
        # Scales of keys and values for an fp8 cache: some tools know others for queries and probabilities, too.
        (r"\.self_attn\.(attn\.)?([kv])_(proj\.)?(\2_|output_)?scale$", r".self_attn.attn.\2_scale"),
        (r"\.self_attn\.(attn\.)?(q_scale|prob_scale|prob_output_scale)$|\.q_proj\.(q|output)_scale$", None),
        # gpt-oss' way to name the parts of a weight in MXFP4.
        (r"\.(\w+_proj)_(blocks|scales)$", r".\1.weight_\2"),
        # Saved from the model without its head.
        (r"^(?!model\.|lm_head\.)", "model."),
    ]
    # Regular expression for the weights, by their names here, that safetensors hold as [inputs, outputs]; None: none.
    transposed_weights: ClassVar[str | None] = None
    # Layout of tensors of all experts in safetensors: [inputs, outputs] or not, gates and ups in turns or not.
    stacked_experts: ClassVar[tuple[bool, bool]] = (False, False)
    # True if checkpoints may hold layers of multi-token prediction beyond num_hidden_layers: they are left out.
    leaves_out_mtp_layers: ClassVar[bool] = False
    # Inputs beside text ("images") that the checkpoint's model reads and this one does not; None: there are none.
    leaves_out: str | None = None

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config, self.tp, self.text = config, tp, config.text

    @classmethod
    def weight_name(cls, checkpoint_name: str) -> str | None:
        """The name here of the tensor that the checkpoint calls ``checkpoint_name``; None: it is left out."""
        name = checkpoint_name
        for pattern, replacement in cls.checkpoint_names:
            if replacement is not None:
                name = re.sub(pattern, replacement, name)
            elif re.search(pattern, name):
                return None
        return name

    @classmethod
    def experts_apart(cls, name: str, source: WeightSource, config: ModelConfig) -> Iterator[tuple[str, WeightSource]]:
        """Split a checkpoint's tensor of all experts into those of each, by the weights' own names; any other stays
        itself."""
        own, stored_otherwise = cls.weight_name(name), config.files.format != "gguf"
        transposed, interleaved = (flag and stored_otherwise for flag in cls.stacked_experts)
        hidden = config.hidden_size if transposed else None
        for number, (found, part) in enumerate(experts_apart(own or name, source, hidden, interleaved)):
            yield (name if number == 0 and part is source else found), part

    def as_weight(self, name: str | None, source: WeightSource) -> WeightSource:
        """The checkpoint's tensor ``source`` as the weight that is called ``name`` here."""
        turned = self.transposed_weights is not None and self.config.files.format != "gguf"
        return Transposed(source) if turned and name and re.search(self.transposed_weights or "", name) else source

    def linear_layers(self) -> list[LinearBase]:
        """Every layer whose weights a `LinearMethod` holds: the head included, tables of embeddings not."""
        return [m for m in self.modules() if isinstance(m, LinearBase) and not isinstance(m, PackedTable)]

    @property
    def row_multiple(self) -> int:
        """Pad a step's rows to a multiple of this, and on a CPU each row's result depends on that row alone."""
        exact = all(isinstance(layer.method, PackedMethod) for layer in self.linear_layers())
        return 1 if exact else GEMM_ROW_MULTIPLE

    @property
    def is_quantized(self) -> bool:
        """True if linear layers compute on int8 activations."""
        return any(isinstance(layer.method, QuantizedRowsMethod) for layer in self.linear_layers())

    def num_weight_bytes(self) -> int:
        """Bytes of weights and of tables that follow from the configuration."""
        return sum(t.nbytes for t in chain(self.parameters(), self.buffers()))

    def weight_bytes_by_kind(self) -> dict[str, int]:
        """`num_weight_bytes`, by how the numbers are stored: "int4", "bfloat16", those of experts apart, "int4
        experts"; tables that follow from the configuration are "tables". The largest first."""
        kinds: Counter[str] = Counter()
        seen: set[int] = set()  # tied layers share a tensor
        experts = {id(m) for layer in self.modules() if isinstance(layer, ExpertsBase) for m in layer.modules()}
        for module in self.modules():
            if isinstance(module, LinearBase | ExpertsBase):
                held = module.method.weight_kinds(module)  # type: ignore[arg-type]
            else:
                held = [(tensor, kind_of(tensor)) for tensor in module.parameters(recurse=False)]
                held += [(tensor, "tables") for tensor in module.buffers(recurse=False)]
            for tensor, kind in held:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    kinds[f"{kind} experts" if id(module) in experts else kind] += tensor.nbytes
        return dict(kinds.most_common())

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The KV cache of each layer that has one, in the order of ``ForwardContext.kv_caches``; this rank's heads."""
        return [attention.kv_cache_spec(self.config.dtype) for attention in self.attention_layers()]

    def state_spec(self) -> StateSpec | None:
        """Return what recurrent layers keep of a sequence, this rank's heads; None: there are no such layers."""
        return None

    def set_groups(self, groups: Iterable[KVCacheGroup]) -> None:
        """Have the layers of each group use its block table."""
        attention = self.attention_layers()
        for index, group in enumerate(groups):
            for layer in group.layers:
                attention[layer].group = index

    def attention_layers(self) -> list[Attention | LatentSelfAttention]:
        """The layers that keep something of a token."""
        kinds = (Attention, LatentSelfAttention)
        found = (m for m in self.modules() if isinstance(m, kinds) and m.has_cache)
        return sorted(found, key=lambda attention: attention.layer)


class CausalLM(Model):
    """A decoder with a head. A family is a subclass that builds `model` and `lm_head` from the parts in `layers`."""

    model: Decoder
    lm_head: ParallelLMHead
    # What all layers keep of a token in the model's dtype, and where this stage's begin (see stages.py); else None.
    specs_of_all: tuple[list[KVCacheSpec], int] | None = None

    def layers_of_one_stage(self) -> list[range]:
        """Neighbours that no two stages of a pipeline share: such that read the keys and values of earlier ones."""
        attention = [m for m in self.modules() if isinstance(m, Attention)]
        return [range(owner.layer, m.layer + 1) for m in attention if (owner := m.shares_kv_with) is not None]

    def share_experts(self) -> None:
        """Have every layer's experts see all rows of a step, as the other replicas expect: called before there are
        weights. Raises ConfigError."""
        if type(self.model).begin is not Decoder.begin:
            raise ConfigError(
                f"enable_expert_parallel with data_parallel_size is not supported for {self.config.architecture} with "
                "embeddings in each layer: leave one of them out"
            )
        self.model.is_cut = False

    def serve_others(self) -> None:
        """Take part in a step of other replicas without rows of one's own."""
        dtype = getattr(torch, self.config.dtype)
        for layer in self.modules():
            if isinstance(layer, FusedMoE):
                layer.serve_others(dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states ``[T, H]`` of the tokens ``input_ids [T]`` at ``positions [T]`` (both int64)."""
        return self.finish(*self.begin(input_ids, positions, ctx))

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext, *received: Tensor) -> DeferredHidden:
        """The first half of `forward`, see `Decoder.begin`: all that reads or writes the KV cache."""
        return self.model.begin(input_ids, positions, ctx, *received)

    def finish(self, *deferred: Tensor) -> Tensor:
        """The second half of `forward`: hidden states ``[R, H]`` from any R rows of what `begin` returned."""
        return self.model.finish(*deferred[: len(deferred) - len(self.model.taps)])

    def tapped(self, *deferred: Tensor) -> tuple[Tensor, ...]:
        """The states that the decoder's `taps` select, ``[R, H]`` each, of any R rows of what `begin` returned."""
        return deferred[len(deferred) - len(self.model.taps) :]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[R, vocab_size]`` of ``hidden [R, H]``: float32 on the CPU, in the model's dtype elsewhere."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def sample(self, hidden: Tensor, rows: SamplingRows) -> SampledRows:
        """Sample a token for each row of ``hidden [R, H]``; ranks may hold parts of the logits. See
        `octavo_kernels.sample`."""
        return self.lm_head.sample(hidden, rows)
