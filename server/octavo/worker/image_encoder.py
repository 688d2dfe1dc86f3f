"""Images of running sequences: encoded once, kept by digest, put in the place of their placeholders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.interface.images import HostTensor, ImageItem
from octavo.interface.step import NewRequestData, SchedulerOutput
from octavo.layers.attention import StepImages
from octavo.models.image_reader import Vision
from octavo.sample import devices


class ImageEncoder:
    """A model's tower at work. Which images are encoded, and how long they are kept, the scheduler says."""

    def __init__(self, vision: Vision, device: torch.device, dtype: torch.dtype, sees_whole: bool = False) -> None:
        """``sees_whole``: an image's tokens see each other in both directions."""
        self._sees_whole = sees_whole
        self._vision, self._device, self._dtype = vision, device, dtype
        self._embeds: dict[str, tuple[Tensor, ...]] = {}  # by digest
        self._items: dict[str, list[ImageItem]] = {}  # of sequences that have rows, by req_id
        self.num_encoded = 0  # images so far

    def update(self, step: SchedulerOutput) -> None:
        """Follow ``step``: drop what is not needed any more, then encode."""
        for digest in step.free_encoder_hashes:
            self._embeds.pop(digest, None)  # of a step that failed it was never there
        for req_id in step.finished_req_ids:
            self._items.pop(req_id, None)
        for data in step.scheduled_new_reqs:
            self._add(data)
        for item in step.encoder_inputs:
            tensors = {name: self._put(tensor) for name, tensor in item.tensors.items()}
            self._embeds[item.digest] = self._vision.encode(tensors)
            self.num_encoded += 1

    def _add(self, data: NewRequestData) -> None:
        self._items.pop(data.req_id, None)
        if data.mm_items:
            self._items[data.req_id] = data.mm_items

    def _put(self, tensor: HostTensor) -> Tensor:
        array = np.frombuffer(bytearray(tensor.data), dtype=tensor.dtype).reshape(tensor.shape)
        put = devices.put(array, self._device)
        return put.to(self._dtype) if put.is_floating_point() else put

    def images_of(
        self, req_ids: Sequence[str], computed: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray
    ) -> StepImages | None:
        """What changes in a step of ``counts`` tokens of the sequences ``req_ids`` from position ``computed`` on. None:
        nothing does."""
        if not self._items:
            return None
        rows, embeds, row = list[np.ndarray](), list[tuple[Tensor, ...]](), 0
        for req_id, start, count in zip(req_ids, computed, counts, strict=True):
            for item in self._items.get(req_id, ()):
                if item.end > start and item.offset < start + count:
                    self._place(item, int(start), int(count), row, rows, embeds)
            row += int(count)
        if not rows:
            return None
        at = devices.put(np.concatenate(rows), self._device)
        first, *deep = (torch.cat(parts) for parts in zip(*embeds, strict=True))
        limit = devices.put(self._limit(req_ids, computed, counts), self._device) if self._sees_whole else None
        return StepImages(at, first, tuple(deep), limit)

    def _limit(
        self, req_ids: Sequence[str], computed: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """The last position that each token sees: int32. Of a placeholder, the image's last one."""
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

    def _place(
        self,
        item: ImageItem,
        start: int,
        count: int,
        row: int,
        rows: list[np.ndarray],
        embeds: list[tuple[Tensor, ...]],
    ) -> None:
        """Add those of the image's placeholders that are among the tokens from position ``start`` on, the first of
        which is the step's row ``row``."""
        places = np.flatnonzero(item.is_embed) + item.offset
        first, end = np.searchsorted(places, (start, start + count))
        if first < end:
            rows.append(places[first:end] - start + row)
            embeds.append(tuple(tensor[first:end] for tensor in self._embeds[item.digest]))
