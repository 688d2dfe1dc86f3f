"""Medusa's draft heads (Cai et al., 2024): each makes of the model's last hidden state the logits of a later token.

The model's own head says the next token; head number i says the one that follows i + 1 tokens later. A head is a few
residual blocks and a matrix of its own, or the model's.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.architectures import MEDUSA_NAMES
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.medusa import MedusaConfig
from octavo.layers.attention import ForwardContext
from octavo.layers.embedding import ParallelLMHead
from octavo.layers.linear import ReplicatedLinear
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM
from octavo.models.draft_vocabulary import DraftVocabulary
from octavo.models.state_reader import StateReader


class ResidualBlocks(nn.Module):
    """Blocks of one head: each adds the SiLU of a projection."""

    def __init__(self, count: int, size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReplicatedLinear(size, size, bias, tp) for _ in range(count))

    def forward(self, state: Tensor) -> Tensor:
        """Apply the blocks: ``[R, H]`` to ``[R, H]``."""
        for layer in self.layers:
            state = octavo_kernels.add(state, octavo_kernels.activate(layer(state), "silu"))
        return state


class MedusaModel(StateReader):
    """All heads, with a matrix each, one together or, where there is none, the model's own."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = MEDUSA_NAMES

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        text, size = config.text_of(MedusaConfig), config.hidden_size
        blocks = (text.num_hidden_layers, size, text.fc_bias, tp)
        self.blocks = nn.ModuleList(ResidualBlocks(*blocks) for _ in range(text.num_heads))
        scale = text.logit_scale
        heads = [ParallelLMHead(text.draft_vocab_size, size, tp, scale=scale) for _ in range(text.num_lm_heads)]
        self.lm_heads = nn.ModuleList(heads)
        vocabulary = (text.draft_vocab_size, config.vocab_size, "token_map")
        self.vocabulary = DraftVocabulary(*vocabulary) if text.maps_tokens else None

    def attach(self, target: CausalLM) -> None:
        """Take the head of ``target`` where there is none here."""
        if not len(self.lm_heads):
            self.lm_heads.append(target.lm_head)

    @property
    def num_reads(self) -> int:
        """See `StateReader`."""
        return 0

    @property
    def num_kinds(self) -> int:
        """See `StateReader`: each head makes a guess of its own."""
        return len(self.blocks)

    def predict(
        self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int = 0
    ) -> Tensor:
        """See `StateReader`: all heads read the target's last state."""
        return before

    def head(self, number: int) -> ParallelLMHead:
        """See `StateReader`."""
        return cast(ParallelLMHead, self.lm_heads[number if len(self.lm_heads) > 1 else 0])

    def head_input(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`."""
        return cast(Tensor, self.blocks[number](state))

    def draft_vocabulary(self) -> DraftVocabulary | None:
        """See `StateReader`."""
        return self.vocabulary
