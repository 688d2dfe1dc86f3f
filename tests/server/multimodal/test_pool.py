"""Images are decoded in processes of their own: the same features, the loop free, nothing left of them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.images import image_of, make_tokenizer

from octavo.multimodal.decode import decode
from octavo.multimodal.pool import Checkpoint, ImagePool, PoolFullError
from octavo.multimodal.processors import image_processor
from octavo.text.tokenizer import Tokenizer

CONFIG = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64}))
    return path


@pytest.fixture
def pool(folder: Path) -> Iterator[ImagePool]:
    made = ImagePool(Checkpoint(str(folder), str(folder), CONFIG), processes=1)
    yield made
    made.close()


def file_of(width: int, height: int, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image_of("RGB", width, height, np.random.default_rng(width)).save(out, form)
    return out.getvalue()


def test_features_are_those_of_this_process_and_refusals_too(pool: ImagePool, folder: Path) -> None:
    processor = image_processor(folder, CONFIG, Tokenizer.from_directory(folder))
    assert processor is not None
    data = file_of(123, 77)
    text = base64.b64encode(data).decode()

    async def ask() -> None:
        expected = processor.process(decode(data))
        for found in (
            await pool.process(data, "file"),
            await pool.process(text, "base64"),
            await pool.process(f"data:image/png;base64,{text}", "url"),
        ):
            assert found.digest == expected.digest
            assert (found.token_ids, found.is_embed) == (expected.token_ids, expected.is_embed)
            assert found.tensors.keys() == expected.tensors.keys()
            for name, values in expected.tensors.items():
                assert found.tensors[name].dtype == values.dtype
                assert np.array_equal(found.tensors[name], values)
        for bad, form in ((data[:50], "file"), ("ümlaut", "base64"), ("data:nothing", "url")):
            with pytest.raises(ValueError, match=r"^image "):
                await pool.process(bad, form)
        assert pool.num_waiting == 0

    asyncio.run(ask())


def test_a_process_that_is_killed_is_replaced(pool: ImagePool) -> None:
    async def ask() -> None:
        data = file_of(60, 60)
        first = await pool.process(data, "file")
        process = next(iter(pool._all))._process
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ValueError, match="could not be processed"):
            await pool.process(data, "file")
        assert (await pool.process(data, "file")).digest == first.digest
        assert process.returncode == -signal.SIGKILL

    asyncio.run(ask())


def test_the_queue_is_bounded(pool: ImagePool) -> None:
    async def ask() -> None:
        pool.most_waiting = 2
        under_way = [asyncio.ensure_future(pool.process(b"", "file")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(PoolFullError, match="2 waiting, limit 2"):
            await pool.process(b"", "file")
        assert all(isinstance(e, ValueError) for e in await asyncio.gather(*under_way, return_exceptions=True))

    asyncio.run(ask())


def test_nothing_is_left_of_a_closed_pool(folder: Path) -> None:
    made = ImagePool(Checkpoint(str(folder), str(folder), CONFIG), processes=1)
    asyncio.run(made.process(file_of(40, 40), "file"))
    process = next(iter(made._all))._process
    made.close()
    assert process.returncode is not None


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.long)])
def test_the_loop_stays_free_while_large_images_are_under_way(pool: ImagePool, count: int) -> None:
    """By the loop's own CPU time in a turn, since other programs may take the processor from it."""
    flat = io.BytesIO()
    Image.new("RGB", (4000, 3000), "teal").save(flat, "JPEG")

    async def ask() -> float:
        await pool.process(file_of(40, 40), "file")
        under_way = [asyncio.ensure_future(pool.process(flat.getvalue(), "file")) for _ in range(count)]
        longest, before = 0.0, time.thread_time()
        while not all(future.done() for future in under_way):
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        await asyncio.gather(*under_way)
        return longest

    assert asyncio.run(ask()) <= 0.020
