"""An image of a prompt on its way from the input processor to the device, as messages carry it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Protocol

from octavo.interface.memory_file import MemoryFile


class Array(Protocol):
    """The part of a numpy array's interface that is used here."""

    @property
    def dtype(self) -> object:
        """The bytes of its numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths, one for each dimension."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        ...

    def tobytes(self) -> bytes:
        """A copy of its numbers, in the order of C."""
        ...


@dataclass(frozen=True)
class HostTensor:
    """An array's numbers, in the order of C: ``data``, or where there is a ``place``, the bytes from there to there of
    the file of its image."""

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    data: memoryview
    place: tuple[int, int] | None = None

    @classmethod
    def of(cls, array: Array, at: int | None = None) -> HostTensor:
        """A copy of a numpy array, or the place in a file where its numbers begin."""
        if at is not None:
            return cls(str(array.dtype), tuple(array.shape), memoryview(b""), (at, at + array.nbytes))
        return cls(str(array.dtype), tuple(array.shape), memoryview(array.tobytes()))


@dataclass
class ImageItem:
    """One image of a prompt, in which it takes the tokens from ``offset`` on.

    Of these, the ones with ``is_embed`` are placeholders: the encoder's embeddings take the place of theirs. Images of
    one ``digest`` have the same embeddings.
    """

    digest: str
    offset: int
    is_embed: list[bool]  # of each token
    tensors: dict[str, HostTensor] = field(default_factory=dict)  # what the encoder reads; empty where it does not
    grid: tuple[int, int, int] | None = None  # embeddings in time, height and width, with M-RoPE
    # The placeholders see each other in both directions: they are computed in one step.
    whole: bool = False
    file: MemoryFile | None = None  # what its tensors' places are in

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + len(self.is_embed)

    @cached_property
    def num_embeds(self) -> int:
        """Embeddings that the encoder gives for it."""
        return sum(self.is_embed)

    @property
    def position_shift(self) -> int:
        """The shift of positions after this image, relative to places in the sequence, that it causes: 0 or below."""
        return 0 if self.grid is None else max(self.grid[1:]) - len(self.is_embed)

    def without_tensors(self) -> ImageItem:
        """A copy that keeps the image's place only."""
        return replace(self, tensors={}, file=None)

    def without_file(self, content: memoryview | None) -> ImageItem:
        """A copy whose tensors hold their data, a part of ``content``; None: another process has the file."""
        if content is None:
            return replace(self, file=None)
        tensors = {
            name: tensor if tensor.place is None else replace(tensor, data=content[slice(*tensor.place)], place=None)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, file=None)

    def keys(self) -> list[int]:
        """A number for each placeholder, by which the prefix cache knows it: of this image's alone, and no token's."""
        root = sha256(self.digest.encode()).digest()
        return [
            1 << 62 | int.from_bytes(sha256(root + i.to_bytes(8, "big")).digest()[:8], "big") >> 2
            for i in range(self.num_embeds)
        ]


def key_token_ids(token_ids: list[int], items: list[ImageItem] | None) -> list[int]:
    """The tokens as the prefix cache tells them apart: the very list ``token_ids`` where there are no images."""
    if not items:
        return token_ids
    keyed = list(token_ids)
    for item in items:
        keys = iter(item.keys())
        for i, is_embed in enumerate(item.is_embed):
            if is_embed:
                keyed[item.offset + i] = next(keys)
    return keyed
