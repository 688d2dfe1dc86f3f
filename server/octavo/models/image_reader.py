"""The parts of a language model that read images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from octavo.interface.engine_config import ModelConfig
from octavo.layers.decoder import Elsewhere
from octavo.layers.mrope import MRotaryEmbedding
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM


class Vision(nn.Module):
    """A tower, and what makes embeddings of what it sees."""

    @abstractmethod
    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Encode one image as the processor made it (its integers are on the host) to embeddings ``[n, H]``, in the
        order of its placeholders; behind them as many tensors ``[n, H]`` as are added to what the first layers return
        (DeepStack)."""


class ReadsImages(CausalLM):
    """A decoder that takes embeddings of images in the place of placeholders. Bring the family's language model behind
    it: ``class Family(ReadsImages, LlamaForCausalLM)``.

    `model.vision` is not there where images are not read: where that was asked for, and in GGUF files. Of a pipeline
    the first stage has it.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        reads = config.reads_images
        self.model.vision = self.create_vision(config) if reads and tp.stage.is_first else Elsewhere()
        self.leaves_out = None if reads else "images"

    @abstractmethod
    def create_vision(self, config: ModelConfig) -> Vision:
        """The family's tower."""

    @property
    def vision(self) -> Vision | None:
        """None: no images are read, or another stage does that."""
        found = self.model.vision
        return found if isinstance(found, Vision) else None

    @property
    def rotary_of_images(self) -> MRotaryEmbedding | None:
        """None: tokens of images have one position, as others have."""
        return next((module for module in self.modules() if isinstance(module, MRotaryEmbedding)), None)
