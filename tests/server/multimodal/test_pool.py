"""Images are decoded in processes of their own: the same features, the loop free, nothing left of them."""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import io
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.hostile_images import image
from support.images import image_of, make_tokenizer

from octavo.multimodal import pool as module
from octavo.multimodal.decode import decode
from octavo.multimodal.pieces import Pieces
from octavo.multimodal.pool import Checkpoint, ImagePool, PoolError, PoolFullError
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
            await pool.process(Pieces([b"data:;base64,", text[:999].encode(), text[999:].encode()]), "url"),
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
        os.kill(process.pid, signal.SIGSTOP)  # so that it is killed while it has an image
        asked = asyncio.ensure_future(pool.process(data, "file"))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ValueError, match="could not be processed"):
            await asked
        assert (await pool.process(data, "file")).digest == first.digest
        assert process.returncode == -signal.SIGKILL

    asyncio.run(ask())


def test_a_process_has_no_secrets_and_can_gain_no_rights(pool: ImagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret-1")
    monkeypatch.setenv("HF_TOKEN", "secret-2")
    asyncio.run(pool.process(file_of(40, 40), "file"))
    about = Path(f"/proc/{next(iter(pool._all))._process.pid}")
    environment = (about / "environ").read_bytes()
    assert b"PATH=" in environment and b"secret" not in environment
    assert "NoNewPrivs:\t1" in (about / "status").read_text()
    assert (about / "oom_score_adj").read_text() == "1000\n"


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


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_too_little_memory_or_no_descriptor_fails_the_image_alone(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = io.BytesIO()
    Image.new("L", (12_000, 12_000)).save(large, "PNG")
    pool._memory = 150 << 20

    def no_file(*args: object, **more: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def ask() -> None:
        first = await pool.process(file_of(60, 60), "file")
        worker = next(iter(pool._all))
        before = descriptors()
        for _ in range(3):
            with pytest.raises(ValueError, match="more memory than there is; scale it down"):
                await pool.process(large.getvalue(), "file")
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", no_file)
            with pytest.raises(PoolError, match="there is no file in memory"):
                await pool.process(file_of(60, 60), "file")
        with monkeypatch.context() as patched:
            patched.setattr(module.subprocess, "Popen", no_file)
            pool._drop(worker)
            pool._idle.get()
            with pytest.raises(PoolError, match="no process for them starts"):
                await pool.process(file_of(60, 60), "file")
        assert descriptors() <= before
        assert (await pool.process(file_of(60, 60), "file")).digest == first.digest

    asyncio.run(ask())


def test_a_checkpoint_that_cannot_be_read_is_nobodys_image(folder: Path) -> None:
    made = ImagePool(Checkpoint(str(folder), str(folder / "none"), CONFIG), processes=1)
    before = descriptors()
    with pytest.raises(PoolError, match="no process for them starts"):
        made.start()
    assert descriptors() <= before and not made._all
    made.close()


def test_features_count_as_long_as_they_are_held(pool: ImagePool) -> None:
    async def ask() -> None:
        held = [await pool.process(file_of(60 + i, 60), "file") for i in range(3)]
        assert pool.num_bytes >= 3 * 60 * 60 * 3 * 4
        pool.most_bytes = pool.num_bytes
        with pytest.raises(PoolFullError, match="images of requests under way take"):
            await pool.process(file_of(60, 60), "file")
        before = descriptors()
        held.clear()
        until = time.monotonic() + 90
        while pool.num_bytes and time.monotonic() < until:  # the thread may not have let go of the last one yet
            await asyncio.sleep(0.01)
            gc.collect()
        assert pool.num_bytes == 0 and descriptors() <= before - 3
        await pool.process(file_of(60, 60), "file")

    asyncio.run(ask())


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=[pytest.mark.long, pytest.mark.slow])])
def test_images_with_random_damage_are_read_or_refused(pool: ImagePool, count: int) -> None:
    """Bits flipped, bytes cut out, put in and repeated: no process ends, nothing grows."""
    draw = random.Random(7)
    whole = [image(form, seed) for seed in range(3) for form in ("PNG", "JPEG", "WEBP", "GIF")]

    def damaged() -> bytes:
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 6)):
            at, size = draw.randrange(len(data)), draw.randint(1, 40)
            kind = draw.randrange(4)
            if kind == 0:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del data[at : at + size]
            elif kind == 2:
                data[at:at] = draw.randbytes(size)
            else:
                data[at:at] = data[at : at + size]
            if not data:
                break
        return bytes(data)

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])

    async def ask() -> None:
        await pool.process(whole[0], "file")
        worker = next(iter(pool._all))
        pid = worker._process.pid
        read, marks = 0, []
        for number in range(count):
            try:
                await pool.process(damaged(), "file")
                read += 1
            except ValueError as error:
                assert str(error).startswith("image ") and "\n" not in str(error)
            if number in (count // 2, count - 1):
                marks.append((len(os.listdir(f"/proc/{pid}/fd")), descriptors(), resident(pid) // 5000))
        assert 0 < read < count  # damage of both kinds
        assert pool._all == {worker} and not worker.has_ended
        assert marks[0] == marks[1] or marks[1] <= tuple(one + 1 for one in marks[0]), marks

    asyncio.run(ask())
