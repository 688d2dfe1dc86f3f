"""Bytes and arrays from process to process: a message of JSON, and a file in memory whose descriptor goes with it, so
that pixels are neither copied through a socket nor encoded."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from octavo.interface.memory_file import MemoryFile
from octavo.multimodal.items import ImageFeatures

_HEAD = struct.Struct("=I")
_ALIGN = 64


def send(sock: socket.socket, message: dict[str, Any], file: MemoryFile | None = None) -> None:
    """Send a message, and perhaps a file; blocks. Raises OSError."""
    text = json.dumps(message).encode()
    head = _HEAD.pack(len(text))
    if file is None:
        sock.sendall(head + text)
        return
    socket.send_fds(sock, [head], [file.descriptor])
    sock.sendall(text)


def receive(sock: socket.socket) -> tuple[dict[str, Any], MemoryFile | None]:
    """The next message, and the file that came with it; blocks. Raises EOFError when the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    files = [MemoryFile(descriptor) for descriptor in descriptors]
    if not head:
        raise EOFError("the other end is closed")
    head += _exactly(sock, _HEAD.size - len(head))
    return json.loads(_exactly(sock, _HEAD.unpack(head)[0])), files[0] if files else None


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other end is closed")
        data += piece
    return bytes(data)


def packed(features: ImageFeatures) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """An image's features as a message and the bytes of its file."""
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


def unpacked(message: dict[str, Any], file: MemoryFile) -> ImageFeatures:
    """The inverse of `packed`; its arrays are in ``file``, and cannot be written."""
    import numpy as np  # a server that is sent no image starts, and goes on, without it

    tensors, places = {}, {}
    for name, dtype, shape, at in message["tensors"]:
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = np.frombuffer(file.content, np.dtype(dtype), count, at).reshape(shape)
        places[name] = at
    ids = tuple(token for token, count, _ in message["runs"] for _ in range(count))
    flags = tuple(bool(flag) for _, count, flag in message["runs"] for _ in range(count))
    return ImageFeatures(message["digest"], tensors, ids, flags, file, places)


def _runs(features: ImageFeatures) -> list[list[int]]:
    """Token ids as [id, how often, whether it is an embedding]."""
    runs: list[list[int]] = []
    for token, flag in zip(features.token_ids, features.is_embed, strict=True):
        if runs and runs[-1][0] == token and runs[-1][2] == flag:
            runs[-1][1] += 1
        else:
            runs.append([token, 1, int(flag)])
    return runs
