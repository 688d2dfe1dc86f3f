"""HTTP requests to pods: limited in time, size and number, so that a faulty pod harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp


class PodUnreadableError(ValueError):
    """A pod has not answered as it should; the message says why. `status`: of its answer, 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class PodClient:
    """`timeout`: seconds of a request; `max_bytes`: of an answer; `max_concurrent`: requests at the same time, 0 for
    any number."""

    def __init__(self, timeout: float, max_bytes: int, max_concurrent: int = 100) -> None:
        self._timeout, self._max_bytes, self._max_concurrent = timeout, max_bytes, max_concurrent
        self._slots = asyncio.Semaphore(max_concurrent) if max_concurrent else None
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, url: str, method: str = "GET", params: Mapping[str, str] | None = None, wait: float = 0.0
    ) -> bytes:
        """Return the body of an answer with status 200. `wait`: seconds that the pod may take longer. Raises
        PodUnreadableError."""
        if self._slots is None:
            return await self._call(url, method, params, wait)
        async with self._slots:
            return await self._call(url, method, params, wait)

    async def close(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()

    async def _call(self, url: str, method: str, params: Mapping[str, str] | None, wait: float) -> bytes:
        if self._session is None:
            # Connections are not kept: an IP address may soon be another pod's.
            connector = aiohttp.TCPConnector(limit=self._max_concurrent, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers={"User-Agent": "octavo-operator"})
        limits = aiohttp.ClientTimeout(total=wait + self._timeout, sock_connect=self._timeout)
        try:
            async with self._session.request(
                method, url, params=params, timeout=limits, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise PodUnreadableError(f"HTTP status {response.status}", response.status)
                return await self._body(response)
        except TimeoutError:
            raise PodUnreadableError(f"no response within {self._timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            cause = error.os_error.strerror or error.os_error
            raise PodUnreadableError(f"connecting to {url} failed: {cause}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PodUnreadableError(str(error) or type(error).__name__) from error

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        out = bytearray()
        async for chunk in response.content.iter_any():
            out += chunk
            if len(out) > self._max_bytes:
                raise PodUnreadableError(f"its answer is larger than {self._max_bytes} bytes")
        return bytes(out)
