"""The images of requests: fetched, then decoded and processed in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.errors import APIError, bad_request
from octavo.multimodal.fetch import MediaRules, fetch
from octavo.multimodal.pool import Checkpoint, ImagePool, PoolFullError

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.multimodal.items import ImageFeatures


@dataclass(eq=False)
class ImagePart:
    """An image in a message. ``where`` is its field, for errors; ``url`` may be a data: one."""

    where: str
    url: str
    features: ImageFeatures | None = None  # once it has been read


class ImageReader:
    """Reads the images of one server's requests."""

    def __init__(self, engine: AsyncLLM, args: ServerArgs) -> None:
        self._engine = engine
        self._rules = MediaRules.of(args.allowed_media_domains, args.allowed_local_media_path)

    @cached_property
    def _pool(self) -> ImagePool:
        files, model = self._engine.config.model.files, self._engine.config.model
        kwargs = model.mm_processor_kwargs
        return ImagePool(Checkpoint(str(files.path), str(files.tokenizer_path), model.hf_config, kwargs))

    async def read(self, parts: Sequence[ImagePart]) -> list[ImageFeatures]:
        """The features of each. Raises APIError that names the field: 400 for images that the model does not read, more
        than a prompt may have, or one that cannot be used, 429 where too many wait."""
        if not parts:
            return []
        try:
            self._engine.input_processor.images.check(len(parts))
        except ValueError as error:
            raise bad_request(f"{parts[0].where}: {error}", parts[0].where) from None
        return list(await asyncio.gather(*map(self._read, parts)))

    async def _read(self, part: ImagePart) -> ImageFeatures:
        if part.features is None:
            try:
                if part.url[:5].lower() == "data:":
                    part.features = await self._pool.process(part.url, "url")
                else:
                    part.features = await self._pool.process(await fetch(part.url, self._rules), "file")
            except ValueError as error:
                raise bad_request(f"{part.where}: {error}", part.where) from None
            except PoolFullError as error:
                raise APIError(429, str(error), headers={"retry-after": "1"}) from None
        return part.features

    def close(self) -> None:
        """End the processes."""
        if "_pool" in self.__dict__:
            self._pool.close()
