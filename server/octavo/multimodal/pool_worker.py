"""A process that decodes and processes images: ``octavo.multimodal.pool_worker SOCKET``, confined.

It reads what the checkpoint is from its first message, answers each further one, and ends when the other end is closed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.interface.memory_file import MemoryFile
from octavo.multimodal import handover
from octavo.multimodal.decode import decode
from octavo.multimodal.fetch import base64_bytes, data_url_bytes
from octavo.multimodal.processors import image_processor
from octavo.multimodal.processors.base import ImageProcessor
from octavo.text.tokenizer import Tokenizer

_NICE = 5  # answers under way come first


def _make_processor(about: dict[str, Any]) -> ImageProcessor:
    tokenizer = Tokenizer.from_directory(about["tokenizer_path"])
    processor = image_processor(Path(about["model_path"]), about["hf_config"], tokenizer, about["mm_processor_kwargs"])
    assert processor is not None, "a pool is made for models that read images"
    return processor


def _answer(
    processor: ImageProcessor, message: dict[str, Any], file: MemoryFile | None
) -> tuple[dict[str, Any], MemoryFile | None]:
    if file is None:
        return {"error": "image could not be processed: too many files are open"}, None
    try:
        if message["form"] == "file":
            data = bytes(file.content)
        else:
            text = str(file.content, "ascii", "replace")
            data = data_url_bytes(text) if message["form"] == "url" else base64_bytes(text)
            del text
        about, pieces = handover.packed(processor.process(decode(data)))
        return about, MemoryFile.of(pieces)
    except ValueError as error:
        return {"error": str(error)}, None
    except (MemoryError, OSError):
        return {"error": "image takes more memory than there is; scale it down"}, None


def _give_way(memory: int) -> None:
    """Let an image that takes too much cost this process alone: it may have ``memory`` more bytes."""
    os.nice(_NICE)
    with contextlib.suppress(OSError, ValueError):  # elsewhere than on Linux, and where less is allowed already
        most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Serve one end of a socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server drains
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        about, _ = handover.receive(sock)
        _give_way(about["memory"])
        try:
            processor = _make_processor(about)
        except OctavoError as error:
            handover.send(sock, {"error": str(error)})
            return
        handover.send(sock, {})
        while True:
            handover.send(sock, *_answer(processor, *handover.receive(sock)))
    except (EOFError, OSError):  # the server has ended
        return


if __name__ == "__main__":
    main()
