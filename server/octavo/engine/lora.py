"""The LoRA adapters that users may name, and what the engine knows them by."""

from __future__ import annotations

from octavo.engine.core import EngineCore
from octavo.interface.lora import Adapter, LoRARequest


class OfflineAdapters:
    """Reads the adapters of `octavo.LLM` when a request first names them, and again once their files have changed."""

    def __init__(self, engine: EngineCore, download_dir: str | None = None) -> None:
        """``download_dir``: where those are kept that are fetched, see `fetch_adapter`."""
        self._engine, self._download_dir = engine, download_dir
        self._folders: dict[str, str] = {}  # of what has been fetched
        self._known: dict[tuple[str, str], tuple[object, Adapter]] = {}

    def find(self, request: LoRARequest) -> Adapter:
        """Raises ValueError where the engine takes no adapters, ModelError for one that it cannot use."""
        from octavo.loader.lora_files import signature

        if self._engine.config.lora is None:
            raise ValueError(f"lora_request {request.lora_name!r} needs LLM(..., enable_lora=True)")
        path = self._folder(request.lora_path)
        key, state = (request.lora_name, path), signature(path)
        known = self._known.get(key)
        if known is None or known[0] != state:
            adapter = self._engine.load_adapter(Adapter(*key)).result()
            known = self._known[key] = (state, adapter)
        return known[1]

    def _folder(self, path: str) -> str:
        if "://" not in path:
            return path
        if path not in self._folders:
            from octavo.fetch.lora import fetch_adapter

            self._folders[path] = str(fetch_adapter(path, download_dir=self._download_dir))
        return self._folders[path]
