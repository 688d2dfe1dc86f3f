"""The images of requests: fetched, then decoded and processed in processes of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.errors import APIError, bad_request
from octavo.errors import OctavoError
from octavo.multimodal.fetch import MediaRules, check_length, fetch, prepare_fetching
from octavo.multimodal.items import ImagePart
from octavo.multimodal.pieces import Pieces
from octavo.multimodal.pool import Checkpoint, Form, ImagePool, PoolError, PoolFullError

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.multimodal.items import ImageFeatures

logger = logging.getLogger(__name__)

_AT_ONCE = 2  # images of one request, for each process: more than the pool takes may be in one prompt


class ImageReader:
    """Reads the images of one server's requests."""

    def __init__(self, engine: AsyncLLM, args: ServerArgs, bodies: Bodies) -> None:
        self._engine, self._bodies = engine, bodies
        self._rules = MediaRules.of(args.allowed_media_domains, args.allowed_local_media_path)

    @cached_property
    def _pool(self) -> ImagePool:
        files, model = self._engine.config.model.files, self._engine.config.model
        kwargs = model.mm_processor_kwargs
        return ImagePool(Checkpoint(str(files.path), str(files.tokenizer_path), model.hf_config, kwargs))

    async def prepare(self) -> None:
        """Import and read what the first image needs, which would take long once there are requests."""
        model = self._engine.config.model
        if not model.reads_images or model.language_model_only:
            return

        def prepare() -> None:
            if self._rules.domains:
                prepare_fetching()
            try:
                self._engine.input_processor.images.check(0)
                self._pool.start()
            except (ValueError, OctavoError, PoolError) as error:
                logger.warning("images are refused: %s", error)

        await self._engine.run_in_thread(prepare)

    async def read(self, parts: Sequence[ImagePart]) -> list[ImageFeatures]:
        """The features of each. Raises APIError that names the field: 400 for images that the model does not read, more
        than a prompt may have, or one that cannot be used, 429 where too many wait, 503 where none can be read."""
        if not parts:
            return []
        try:
            self._engine.input_processor.images.check(len(parts))
        except (ValueError, OctavoError) as error:
            raise bad_request(f"{parts[0].where}: {error}", parts[0].where) from None
        turns = asyncio.Semaphore(_AT_ONCE * self._pool.size)
        with self._bodies.share() as share:
            share.add(sum(len(part.content) for part in parts))
            tasks = [asyncio.ensure_future(self._read(part, turns)) for part in parts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:  # after an error: what has not begun need not begin
                for task in tasks:
                    task.cancel()

    async def _read(self, part: ImagePart, turns: asyncio.Semaphore) -> ImageFeatures:
        async with turns:
            if part.features is None:
                part.features = await self._features(part)
                part.content = ""
            return part.features

    async def _features(self, part: ImagePart) -> ImageFeatures:
        form: Form = "base64" if part.is_base64 else "url"
        content: str | bytes | Pieces = part.content
        begin = part.content.begin(5) if isinstance(part.content, Pieces) else part.content[:5]
        try:
            if form == "url" and begin.lower() != "data:":
                content, form = await fetch(str(part.content), self._rules), "file"
            else:
                check_length(part.content)
            return await self._pool.process(content, form)
        except ValueError as error:
            raise bad_request(f"{part.where}: {error}", part.where) from None
        except PoolFullError as error:
            raise APIError(429, str(error), headers={"retry-after": "1"}) from None
        except PoolError as error:
            raise APIError(503, str(error), headers={"retry-after": "1"}) from None

    def close(self) -> None:
        """End the processes."""
        if "_pool" in self.__dict__:
            self._pool.close()
