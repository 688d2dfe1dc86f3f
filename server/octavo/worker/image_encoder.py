"""Images of running sequences: encoded once, kept by digest, put in the place of their placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.interface.architectures import SEES_IMAGES_WHOLE
from octavo.interface.engine_config import ModelConfig
from octavo.interface.images import HostTensor, ImageItem
from octavo.interface.step import NewRequestData, SchedulerOutput
from octavo.layers.attention import StepImages
from octavo.layers.mrope import MRotaryEmbedding
from octavo.memory.images import num_deep
from octavo.models.image_reader import Vision
from octavo.sample import devices
from octavo.worker.input_batch import StepInputs


def _array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(bytearray(tensor.data), dtype=tensor.dtype).reshape(tensor.shape)


class ImageEncoder:
    """A model's tower at work. Which images are encoded, and how long they are kept, the scheduler says.

    On later stages of a pipeline there is no tower: states come with what images have put into them, and only how
    tokens of images attend is to be known.
    """

    def __init__(
        self, vision: Vision | None, device: torch.device, config: ModelConfig, rotary: MRotaryEmbedding | None = None
    ) -> None:
        """``vision``: None on a stage without it; ``rotary``: placeholders have three positions."""
        self._sees_whole = config.architecture in SEES_IMAGES_WHOLE  # an image's tokens, in both directions
        self._rotary = rotary
        self._vision, self._device, self._dtype = vision, device, getattr(torch, config.dtype)
        self._hidden, self._num_deep = config.hidden_size, num_deep(config)
        self._embeds: dict[str, tuple[Tensor, ...]] = {}  # by digest
        self._items: dict[str, list[ImageItem]] = {}  # of sequences that have rows and are not past them, by req_id
        self.num_encoded = 0  # images so far

    @property
    def matters(self) -> bool:
        """True if images change anything on this stage."""
        return self._vision is not None or self._rotary is not None or self._sees_whole

    def update(self, step: SchedulerOutput) -> None:
        """Follow ``step``: drop what is not needed any more, then encode."""
        for digest in step.free_encoder_hashes:
            self._embeds.pop(digest, None)  # of a step that failed it was never there
        for req_id in step.finished_req_ids:
            self._items.pop(req_id, None)
        for data in step.scheduled_new_reqs:
            self._add(data)
        for item in step.encoder_inputs if self._vision is not None else ():
            tensors = {name: self._put(_array(tensor)) for name, tensor in item.tensors.items()}
            self._embeds[item.digest] = self._encode(tensors)
            self.num_encoded += 1

    def _encode(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Encode an image; cached embeddings must not keep the memory of a larger tensor."""
        assert self._vision is not None
        made = self._vision.encode(tensors)
        return tuple(part.clone() if part.untyped_storage().nbytes() > part.nbytes else part for part in made)

    @torch.inference_mode()
    def run_outline(self, outline: Mapping[str, np.ndarray]) -> None:
        """Encode an image that `octavo.multimodal` has the outline of, and keep nothing."""
        tensors = {}
        for name, array in outline.items():
            if array.dtype == np.float32:  # pixels, which have no memory here
                tensors[name] = torch.zeros(array.shape, device=self._device).to(self._dtype)
            else:
                tensors[name] = self._put(array)
        self._encode(tensors)

    def outline_of_step(self, tokens: int, start: int) -> StepImages:
        """The images of a step of ``tokens`` tokens in which all from the row ``start`` on are placeholders."""
        rows = torch.arange(start, tokens, device=self._device)
        embeds = torch.zeros(len(rows), self._hidden, dtype=self._dtype, device=self._device)
        limit = torch.arange(tokens, dtype=torch.int32, device=self._device) if self._sees_whole else None
        deep, turns, order = tuple(torch.zeros_like(embeds) for _ in range(self._num_deep)), None, None
        if self._rotary is not None:
            turns = torch.zeros(tokens, self._rotary.cos_sin_cache.shape[1], device=self._device)
            order = torch.arange(tokens, device=self._device)
        return StepImages(rows, embeds, deep, limit, cos_sin=turns, order=order)

    @contextmanager
    def pretended(self, length: int) -> Iterator[ImageItem]:
        """An image of so many placeholders that is encoded already, at the beginning of a prompt."""
        embeds = torch.zeros(length, self._hidden, dtype=self._dtype, device=self._device)
        self._embeds["pretended"] = embeds, *(embeds for _ in range(self._num_deep))
        grid = (1, 1, length) if self._rotary is not None else None
        yield ImageItem("pretended", 0, [True] * length, grid=grid, whole=self._sees_whole)
        del self._embeds["pretended"]

    def _add(self, data: NewRequestData) -> None:
        self._items.pop(data.req_id, None)
        if data.mm_items:
            self._items[data.req_id] = data.mm_items

    def _put(self, array: np.ndarray) -> Tensor:
        if array.dtype.kind != "f":
            return torch.from_numpy(array)  # which says how the host is to go about it
        return devices.put(array, self._device).to(self._dtype)

    def images_of(
        self, req_ids: Sequence[str], computed: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray
    ) -> StepImages | None:
        """Images' changes to a step of ``counts`` tokens of the sequences ``req_ids`` from position ``computed`` on.
        None: no change."""
        if not self._items:
            return None
        seen, row = list[_Seen](), 0
        for req_id, start, count in zip(req_ids, computed, counts, strict=True):
            items, shift = self._items.get(req_id), 0
            if items is not None and items[-1].end <= start:
                del self._items[req_id]  # the rest of it is text
                items = None
            for item in items or ():
                if item.end > start and item.offset < start + count:
                    seen += self._seen(item, int(start), int(count), row, shift)
                shift += item.position_shift
            row += int(count)
        if not seen:
            return None
        at = devices.put(np.concatenate([one.rows for one in seen]), self._device)
        embeds = [torch.cat(parts) for parts in zip(*(one.embeds for one in seen), strict=True)]
        limit = devices.put(self._limit(req_ids, computed, counts), self._device) if self._sees_whole else None
        positions = None
        if self._rotary is not None:
            positions = devices.put(np.concatenate([one.positions for one in seen], axis=1), self._device)
        return StepImages(at, embeds[0] if embeds else None, tuple(embeds[1:]), limit, positions)

    def fit(self, images: StepImages, inputs: StepInputs) -> StepImages:
        """The same for the step's inputs, which are made: with their padding, and how each token is turned."""
        images = images.padded(len(inputs.positions))
        if self._rotary is None or images.positions is None:
            return images
        turns = self._rotary.cos_sin_cache[inputs.rotary_positions]
        assert images.rows is not None
        turns.index_copy_(0, images.rows, self._rotary.of_images(images.positions))
        return replace(images, cos_sin=turns, order=torch.arange(len(turns), device=self._device))

    def _limit(
        self, req_ids: Sequence[str], computed: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """The last position that each token sees, int32; for a placeholder, its image's last one."""
        limits = []
        for req_id, start, count in zip(req_ids, computed, counts, strict=True):
            limit = np.arange(start, start + count, dtype=np.int32)
            for item in self._items.get(req_id, ()):
                places = np.flatnonzero(item.is_embed) + item.offset
                seen = places[(places >= start) & (places < start + count)]
                limit[seen - start] = places[-1]
            limits.append(limit)
        whole: np.ndarray = np.concatenate(limits)
        return whole

    def _seen(self, item: ImageItem, start: int, count: int, row: int, shift: int) -> list[_Seen]:
        """The image's placeholders among the tokens from position ``start`` on, the first of which is the step's row
        ``row``. ``shift``: of positions before the image."""
        places = np.flatnonzero(item.is_embed) + item.offset
        first, end = np.searchsorted(places, (start, start + count))
        if first == end:
            return []
        embeds = tuple(tensor[first:end] for tensor in self._embeds[item.digest]) if self._vision is not None else ()
        positions = _NOWHERE
        if item.grid is not None:
            positions = np.indices(item.grid).reshape(3, -1)[:, first:end] + item.offset + shift
        return [_Seen(places[first:end] - start + row, embeds, positions)]


@dataclass
class _Seen:
    """M placeholders of one image in a step."""

    rows: np.ndarray  # int64 [M]
    embeds: tuple[Tensor, ...]
    positions: np.ndarray  # int64 [3, M]; empty where they are their places


_NOWHERE = np.empty((3, 0), dtype=np.int64)
