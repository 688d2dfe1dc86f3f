"""The LoRA adapters that this server serves: those of --lora-modules, and those that requests load and unload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.entrypoints.args import ADAPTER_NAME, parse_module
from octavo.entrypoints.errors import APIError, bad_request
from octavo.errors import ConfigError, OctavoError
from octavo.interface.lora import Adapter

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM

_MAX_FILES = 100  # in an adapter's folder
MAX_ADAPTERS = 1024  # that may be named

# Of the current request, as its field "model" has said.
current_adapter: ContextVar[Adapter | None] = ContextVar("current_adapter", default=None)


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter under its name, and when it was loaded, in seconds since the epoch."""

    adapter: Adapter
    created: int
    base: str | None = None  # what --lora-modules says
    source: str | None = None  # of one that --lora-list lists, where it comes from


class Adapters:
    """Adapters by name. A name stands for what its files held when they were loaded; requests under way keep that."""

    def __init__(self, engine: AsyncLLM, lora_dir: str | None, taken: Iterable[str]) -> None:
        """``lora_dir``: below it lies what requests may load; ``taken``: names that are the model's."""
        self._engine, self._taken = engine, frozenset(taken)
        self._dir = Path(lora_dir) if lora_dir is not None else None
        self._served: dict[str, ServedAdapter] = {}
        self._lock = asyncio.Lock()

    def __getitem__(self, name: str) -> ServedAdapter | None:
        return self._served.get(name)

    def all(self) -> list[ServedAdapter]:
        """List adapters in the order of their loading."""
        return list(self._served.values())

    async def load(self, name: str, path: str, replace: bool = False) -> None:
        """Read an adapter from ``path`` and serve it as ``name``. Raises APIError: 400 for one that cannot be used, or
        whose name is taken, unless ``replace``."""
        self._check_name(name)
        where = await self._engine.run_in_thread(self._allowed, path)
        async with self._lock:
            if name in self._served and not replace:
                raise bad_request(
                    f"adapter {name!r} is loaded already; unload it first, or set load_inplace to replace it",
                    "lora_name",
                )
            if name not in self._served and len(self._served) >= MAX_ADAPTERS:
                raise bad_request(f"{MAX_ADAPTERS} adapters are loaded, and no more can be: unload one", "lora_name")
            try:
                await self._read(name, where)
            except OctavoError as error:
                raise bad_request(f"adapter {name!r}: {error}", "lora_path") from None

    async def load_modules(self, modules: Iterable[str]) -> None:
        """Load the adapters of --lora-modules, wherever they are. Raises ConfigError."""
        for name, path, base in map(parse_module, modules):
            if name in self._taken or name in self._served:
                raise ConfigError(f"lora_modules: {name!r} is given twice, or is the model's own name")
            try:
                await self._read(name, path, base)
            except OctavoError as error:
                raise ConfigError(f"lora_modules: {name}: {error}") from None

    async def load_listed(self, name: str, path: str, source: str) -> None:
        """One of --lora-list, in place of the one that was listed under its name before. Raises APIError and
        OctavoError."""
        self._check_name(name)
        async with self._lock:
            if (served := self._served.get(name)) and served.source is None:
                raise bad_request(f"an adapter {name!r} is loaded that is not the list's; unload it", "lora_name")
            await self._read(name, path, source=source)

    def unload_listed(self, name: str) -> None:
        """The list has it no more."""
        if (served := self._served.get(name)) and served.source is not None:
            del self._served[name]

    async def _read(self, name: str, path: str, base: str | None = None, source: str | None = None) -> None:
        adapter = await self._engine.load_adapter(Adapter(name, path))
        self._served.pop(name, None)
        self._served[name] = ServedAdapter(adapter, int(time.time()), base, source)

    def unload(self, name: str) -> None:
        """Serve no more requests of an adapter. Raises a 404 for one that is not there."""
        if self._served.pop(name, None) is None:
            raise APIError(404, f"adapter {name[:200]!r} is not loaded", param="lora_name", code="model_not_found")

    def _check_name(self, name: str) -> None:
        if not ADAPTER_NAME.fullmatch(name):
            raise bad_request(
                "lora_name must be 1 to 256 letters, digits and ._:@/+=~-, and begin with a letter or digit, got "
                f"{name[:80]!r}",
                "lora_name",
            )
        if name in self._taken or name.removesuffix(":latest") in self._taken:
            raise bad_request(f"lora_name {name!r} is the model's own name: choose another", "lora_name")

    def _allowed(self, path: str) -> str:
        """``path`` resolved. Raises a 400 unless it and its files are below --lora-dir, whatever links lead to."""
        if self._dir is None:
            raise bad_request(
                "lora_path: the server was started without --lora-dir, below which adapters lie", "lora_path"
            )
        try:
            root = self._dir.resolve(strict=True)
            found = (root / path).resolve()
            inside = [entry.resolve() for entry in islice(found.iterdir(), _MAX_FILES)] if found.is_dir() else []
        except (OSError, ValueError, RuntimeError):
            raise bad_request(f"lora_path {path[:200]!r} cannot be read", "lora_path") from None
        if not all(one.is_relative_to(root) for one in (found, *inside)):
            raise bad_request(f"lora_path {path[:200]!r} is not below --lora-dir", "lora_path")
        return str(found)
