"""The LoRA adapters that users may name, and what the engine knows them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.interface.engine_config import LoRAConfig
from octavo.interface.lora import Adapter, LoRARequest

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore


class KnownAdapters:
    """Adapters that have been read, by their names, and the state of their files when that was done."""

    def __init__(self, download_dir: str | None = None) -> None:
        """``download_dir``: where those are kept that are fetched, see `fetch_adapter`."""
        self._download_dir = download_dir
        self._folders: dict[str, str] = {}  # of what has been fetched
        self._known: dict[tuple[str, str], tuple[object, Adapter]] = {}

    def look_up(self, request: LoRARequest) -> tuple[Adapter, object]:
        """The adapter, without a digest if it has to be read (again), and the state of its files. May fetch them.
        Raises ModelError."""
        from octavo.loader.lora_files import signature

        path = self._folder(request.lora_path)
        key, state = (request.lora_name, path), signature(path)
        known = self._known.get(key)
        return (known[1] if known is not None and known[0] == state else Adapter(*key)), state

    def keep(self, adapter: Adapter, state: object) -> Adapter:
        """Remember an adapter that has been read from files in ``state``."""
        self._known[adapter.name, adapter.path] = (state, adapter)
        return adapter

    def _folder(self, path: str) -> str:
        if "://" not in path:
            return path
        if path not in self._folders:
            from octavo.fetch.lora import fetch_adapter

            self._folders[path] = str(fetch_adapter(path, download_dir=self._download_dir))
        return self._folders[path]


class OfflineAdapters:
    """Reads the adapters of `octavo.LLM` when a request first names them, and again once their files have changed."""

    def __init__(self, engine: EngineCore, download_dir: str | None = None) -> None:
        self._engine, self._known = engine, KnownAdapters(download_dir)

    def find(self, request: LoRARequest) -> Adapter:
        """Raises ValueError where the engine takes no adapters, ModelError for one that it cannot use."""
        check_takes_adapters(self._engine.config.lora, request)
        adapter, state = self._known.look_up(request)
        if adapter.digest:
            return adapter
        return self._known.keep(self._engine.load_adapter(adapter).result(), state)


def check_takes_adapters(config: LoRAConfig | None, request: LoRARequest) -> None:
    """Raises ValueError where the engine takes no adapters."""
    if config is None:
        raise ValueError(f"lora_request {request.lora_name!r} needs enable_lora=True when the engine is made")
