"""Bytes and arrays from process to process: a message of JSON, and a file in memory whose descriptor goes with it, so
that pixels are neither copied through a socket nor encoded."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

from octavo.multimodal.items import ImageFeatures

_HEAD = struct.Struct("=I")
_ALIGN = 64


def memory_file(pieces: Sequence[bytes | memoryview]) -> int:
    """A descriptor of a file in memory with these bytes."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo-image", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> memoryview:
    """The bytes of such a file, mapped; ``descriptor`` is closed."""
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(descriptor)


def send(sock: socket.socket, message: dict[str, Any], pieces: Sequence[bytes | memoryview] = ()) -> None:
    """Send a message and, always, a file with ``pieces``; blocks. Raises OSError."""
    text = json.dumps(message).encode()
    descriptor = memory_file(pieces)
    try:
        socket.send_fds(sock, [_HEAD.pack(len(text))], [descriptor])
    finally:
        os.close(descriptor)
    sock.sendall(text)


def receive(sock: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """The next message and its file; blocks. Raises EOFError when the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    if not head or not descriptors:
        raise EOFError("the other end is closed")
    content = mapped(descriptors[0])
    while len(head) < _HEAD.size:
        head += _exactly(sock, _HEAD.size - len(head))
    message = json.loads(_exactly(sock, _HEAD.unpack(head)[0]))
    return message, content


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other end is closed")
        data += piece
    return bytes(data)


def packed(features: ImageFeatures) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """What `send` takes for an image's features."""
    import numpy as np

    tensors, pieces, at = [], list[bytes | memoryview](), 0
    for name, array in features.tensors.items():
        data = np.ascontiguousarray(array).data.cast("B")
        tensors.append([name, str(array.dtype), list(array.shape), at])
        padding = -len(data) % _ALIGN
        pieces += [data, bytes(padding)]
        at += len(data) + padding
    runs = _runs(features)
    return {"digest": features.digest, "tensors": tensors, "runs": runs}, pieces


def unpacked(message: dict[str, Any], content: memoryview) -> ImageFeatures:
    """The inverse of `packed`; its arrays are ``content`` and cannot be written."""
    import numpy as np  # a server that is sent no image starts, and goes on, without it

    tensors = {}
    for name, dtype, shape, at in message["tensors"]:
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = np.frombuffer(content, np.dtype(dtype), count, at).reshape(shape)
    ids = tuple(token for token, count, _ in message["runs"] for _ in range(count))
    flags = tuple(bool(flag) for _, count, flag in message["runs"] for _ in range(count))
    return ImageFeatures(message["digest"], tensors, ids, flags)


def _runs(features: ImageFeatures) -> list[list[int]]:
    """Token ids as [id, how often, whether it is an embedding]."""
    runs: list[list[int]] = []
    for token, flag in zip(features.token_ids, features.is_embed, strict=True):
        if runs and runs[-1][0] == token and runs[-1][2] == flag:
            runs[-1][1] += 1
        else:
            runs.append([token, 1, int(flag)])
    return runs
