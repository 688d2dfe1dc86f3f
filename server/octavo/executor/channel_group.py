"""Ranks that exchange tensors over TLS connections, all by way of rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.executor.tls_channel import TlsChannel
from octavo.layers.parallel import GatheringGroup
from octavo.system.channel import Kind


class ChannelGroup(GatheringGroup):
    """See `octavo.layers.parallel.Group`: everything is gathered, and added up in the order of ranks on each."""

    def __init__(
        self, channels: Sequence[TlsChannel], rank: int, ranks: int, timeout_seconds: float, member: str = "rank"
    ) -> None:
        """``channels``: of rank 0 to the others in their order, of another to rank 0. ``member``: what errors call one,
        where each of these speaks for a node."""
        self.rank, self.ranks = rank, ranks
        self._late: list[int] = []
        self._channels, self._timeout, self._member = channels, timeout_seconds, member

    @property
    def late(self) -> list[int]:
        """See `Group`."""
        return self._late

    def stop(self) -> None:
        """See `Group`."""
        for channel in self._channels:
            channel.close()

    def gather(self, x: Tensor) -> list[Tensor]:
        """See `TorchGroup`."""
        own = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if self.rank:
            self._send(own)
            whole = self._receive(self._channels[0], 0)
        else:
            parts: list[bytes | bytearray] = [
                own,
                *(self._receive(channel, i + 1) for i, channel in enumerate(self._channels)),
            ]
            whole = bytearray(b"".join(parts))
            self._send(whole)
        if len(whole) != len(own) * self.ranks:
            raise RuntimeError(f"ranks have exchanged {len(whole)} bytes, not {self.ranks} x {len(own)}")
        return [part.view(x.shape) for part in torch.frombuffer(whole, dtype=x.dtype).chunk(self.ranks)]

    def _send(self, data: bytes | bytearray) -> None:
        for channel in self._channels:
            channel.send(Kind.TENSOR, bytes(data))
        for channel in self._channels:
            if not channel.flush(self._timeout):
                raise RuntimeError(f"{self._member} {self.rank} could not send within {self._timeout:g} s")

    def _receive(self, channel: TlsChannel, rank: int) -> bytearray:
        self._late = [rank]
        try:
            while not (frames := list(channel.receive())):
                if not channel.wait(self._timeout):
                    raise RuntimeError(
                        f"{self._member} {rank} did not take part in an exchange within {self._timeout:g} s"
                    )
        except EOFError as error:
            raise RuntimeError(f"{self._member} {rank}: {error}") from None
        ((_, payload),) = frames
        self._late = []
        return payload
