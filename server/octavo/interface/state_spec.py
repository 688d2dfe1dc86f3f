"""The state that recurrent layers keep of a sequence: of one size, however long the sequence is.

Of each layer it is the last inputs of a convolution and, unless the layer is a convolution alone, a matrix for every
value head, all in float32: a state is rounded at every token. It lies in blocks of the KV cache's pool, cut into
granules of one size, which `octavo_kernels.recurrence` describes. Blocks of a state belong to one sequence, or to
samples of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

_NUMBER = 4  # bytes
_ALIGNMENT = 64  # bytes, of blocks that hold granules
_CHANNELS = 64  # whose inputs a granule holds where there are no matrices


@dataclass(frozen=True)
class StateSpec:
    """The recurrent layers of a model, which are all alike; heads are this rank's.

    ``taps``: inputs that the convolution sees, a token's own included. Its channels are those of queries and keys of
    ``key_heads`` and of values, or ``plain_channels`` where there are no heads.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    plain_channels: int = 0

    @property
    def channels(self) -> int:
        """Channels of the convolution of a layer."""
        return self.plain_channels or 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of a sequence, without padding."""
        matrices = self.value_heads * self.key_size * self.value_size
        return self.num_layers * (matrices + (self.taps - 1) * self.channels) * _NUMBER

    @property
    def row_bytes(self) -> int:
        """Bytes of a token whose row is pending, in all layers: inputs, keys, updates and decays."""
        heads = self.key_heads * self.key_size + self.value_heads * (self.value_size + 1)
        return self.num_layers * (self.channels + heads) * _NUMBER

    @property
    def columns(self) -> int:
        """Columns of a head's matrix in a granule."""
        return 32 if self.value_size % 32 == 0 else 16

    @property
    def granule_bytes(self) -> int:
        """Bytes of a granule."""
        return self._granule_numbers * _NUMBER

    @property
    def _granule_numbers(self) -> int:
        return self.key_size * self.columns if self.value_heads else _CHANNELS * (self.taps - 1)

    @property
    def channels_of_granule(self) -> int:
        """Channels whose inputs a granule holds: whole vectors of every processor, four of the widest if it can be."""
        count = self._granule_numbers // (self.taps - 1)
        return count - count % (64 if count >= 64 else 8)

    @property
    def matrix_granules(self) -> int:
        """Granules of a layer's matrices."""
        return self.value_heads * -(-self.value_size // self.columns)

    @property
    def window_granules(self) -> int:
        """Granules of the inputs of a layer's convolution."""
        return -(-self.channels // self.channels_of_granule)

    def block_bytes(self, kv_bytes: int) -> int:
        """Bytes of a block that holds ``kv_bytes`` of keys and values: at least one granule, a few if it has none."""
        least = self.granule_bytes if kv_bytes else 4 * self.granule_bytes
        return -(-max(kv_bytes, least) // _ALIGNMENT) * _ALIGNMENT

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks of ``block_bytes`` that a state takes."""
        granules = self.num_layers * (self.matrix_granules + self.window_granules)
        return -(-granules // (block_bytes // self.granule_bytes))
