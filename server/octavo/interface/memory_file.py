"""Bytes in memory that processes share: a file without a name, whose descriptor goes from one to the other."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterable
from functools import cached_property

_NAME_BYTES = 64
_SECONDS = 5.0  # for a file that was sent before it is asked for


class MemoryFile:
    """Owns ``descriptor``, which is closed with the last reference; what is mapped stays longer."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> MemoryFile:
        """A file with these bytes. Raises OSError."""
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
        return cls(descriptor)

    @cached_property
    def content(self) -> memoryview:
        """Its bytes, mapped: they cannot be written."""
        if not self.size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ))

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "size"):  # else it was never ours
            self.close()


def send_file(sock: socket.socket, name: str, file: MemoryFile) -> None:
    """Hand a file over, under a ``name`` of at most 64 letters. Raises OSError at once where the other end has not
    received those before."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", file.descriptor))]
    sock.sendmsg([name.encode().ljust(_NAME_BYTES)], rights, socket.MSG_DONTWAIT)  # socket.send_fds ignores flags


def receive_file(sock: socket.socket, name: str) -> MemoryFile:
    """The file of that ``name``, which has been sent; others before it are dropped. Raises ValueError."""
    sock.settimeout(_SECONDS)
    while True:
        try:
            found, descriptors, _, _ = socket.recv_fds(sock, _NAME_BYTES, 1)
        except OSError as error:
            raise ValueError(f"the file {name} has not arrived: {error}") from None
        files = [MemoryFile(descriptor) for descriptor in descriptors]
        if not found:
            raise ValueError(f"the file {name} has not arrived: the other end is closed")
        if found.decode().rstrip() == name:
            if not files:
                raise ValueError(f"the file {name} cannot be opened: too many are open")
            return files[0]
