"""Fields of hybrid models, in which some layers are recurrent."""

from __future__ import annotations

from abc import abstractmethod

from octavo.interface.model_config.text import TextConfig
from octavo.interface.state_spec import StateSpec

MAX_TAPS = 8  # of convolutions, as kernels take them


class HybridConfig(TextConfig):
    """Layers that keep a state of a sequence, beside such with attention."""

    @abstractmethod
    def is_recurrent(self, layer: int) -> bool:
        """Return whether layer number ``layer`` keeps a state."""

    @abstractmethod
    def state_of(self, ranks: int) -> StateSpec:
        """Return what the recurrent layers keep of a sequence on one of so many ranks."""

    @property
    def num_recurrent_layers(self) -> int:
        """See `TextConfig`."""
        return sum(self.is_recurrent(layer) for layer in range(self.num_hidden_layers))
