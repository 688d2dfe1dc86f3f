"""Random weights for benchmarks: the right shapes without a download."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from octavo.layers.weights import WeightSlot

_SPREAD = 0.02 * 3**0.5  # uniform numbers with the standard deviation that models are initialised with


class DummyWeight:
    """A `WeightSource` of random numbers made on the device, the same for the same seed, name and kind of device.

    Norms (vectors called weight) are ones and biases zeros, so that activations stay of sane size at any depth.
    """

    qtype = "F32"

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, device: torch.device | str) -> None:
        self.name, self.shape = name, shape
        self._seed, self._device = seed, device

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        target = torch.empty(self.shape, dtype=dtype, device=self._device)
        self.load_into(target)
        return target

    def load_into(self, target: torch.Tensor) -> None:
        """See `WeightSource`."""
        if len(self.shape) < 2:
            target.fill_(float(self.name.endswith(".weight")))
            return
        generator = torch.Generator(self._device)
        # One number of 32 bits, because the generator of the CPU looks at no more of its seed.
        generator.manual_seed(zlib.crc32(f"{self._seed} {self.name}".encode()))
        target.uniform_(-_SPREAD, _SPREAD, generator=generator)

    def __getitem__(self, index: int | slice) -> DummyWeight:
        """See `WeightSource`; other numbers than those of the whole."""
        first, *rest = self.shape
        shape = (*rest,) if isinstance(index, int) else (len(range(first)[index]), *rest)
        return DummyWeight(f"{self.name}[{index}]", shape, self._seed, self._device)

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`."""
        yield self.load(dtype)[rows]


def dummy_weights(
    slots: dict[str, list[WeightSlot]], seed: int, device: torch.device | str
) -> Iterator[tuple[str, DummyWeight]]:
    """A tensor for every slot that needs one, under the weights' own names."""
    # Torch's generators want this module, which octavo.system.torch_import keeps from being imported.
    import torch._prims.rng_prims  # noqa: F401

    for name, takers in slots.items():
        if takers[0].shape is not None:
            yield name, DummyWeight(name, takers[0].shape, seed, device)
