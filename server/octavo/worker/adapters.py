"""LoRA adapters in a worker: read in a thread, kept in host memory, brought into slots between steps."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch

from octavo.errors import ConfigError
from octavo.interface.adapters import Adapter
from octavo.interface.engine_config import EngineConfig, LoRAConfig
from octavo.loader.adapters import LoadedAdapter, ModelAdapters
from octavo.models.base import CausalLM

logger = logging.getLogger(__name__)


def make_adapters(model: CausalLM, config: EngineConfig, overlap: bool) -> AdapterManager | None:
    """None where ``config`` has none. ``overlap``: steps overlap. Raises ConfigError."""
    if config.lora is None:
        return None
    if overlap:
        raise ConfigError("enable_lora is not supported yet where steps overlap, as they do on GPUs: leave it out")
    return AdapterManager(model, config.lora)


class AdapterManager:
    """Keeps up to ``max_cpu_loras`` adapters in host memory, the least recently used goes first. Those in slots stay in
    use all the same."""

    def __init__(self, model: CausalLM, config: LoRAConfig) -> None:
        self.model_adapters = ModelAdapters(model, config)
        self._capacity = config.max_cpu_loras
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # by digest
        # Those that are to be brought into slots, whatever else is read meanwhile: no more than there are slots.
        self._kept: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._num_slots = config.max_loras
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self.num_changes = 0  # of which layers take adapters at all

    def load(self, adapter: Adapter) -> Future[Adapter]:
        """Have an adapter in host memory, in a while; the future has it with its digest, and raises ModelError. One
        that has a digest already may be there, under any name."""
        with self._lock:
            known = self._loaded.get(adapter.digest)
            if known is not None:
                self._loaded.move_to_end(adapter.digest)
                self._keep(known)
                done: Future[Adapter] = Future()
                done.set_result(adapter)
                return done
        return self._thread.submit(self._load, adapter)

    def _load(self, adapter: Adapter) -> Adapter:
        started = time.perf_counter()
        with torch.inference_mode():
            loaded = self.model_adapters.load(adapter.path, adapter.digest)
        with self._lock:
            if adapter.digest:
                self._keep(loaded)
            self._loaded[loaded.digest] = loaded
            self._loaded.move_to_end(loaded.digest)
            while len(self._loaded) > self._capacity:
                self._loaded.popitem(last=False)
        seconds = time.perf_counter() - started
        logger.info("loaded adapter %r of rank %d in %.2f s", adapter.name, loaded.rank, seconds)
        return Adapter(adapter.name, adapter.path, loaded.digest, loaded.rank)

    def _keep(self, loaded: LoadedAdapter) -> None:
        self._kept[loaded.digest] = loaded
        self._kept.move_to_end(loaded.digest)
        while len(self._kept) > self._num_slots:
            self._kept.popitem(last=False)

    def put(self, adapters: Mapping[int, Adapter]) -> None:
        """Bring adapters into slots. Raises ModelError where a rank which is to read one now cannot."""
        for slot, adapter in adapters.items():
            with self._lock:
                loaded = self._kept.pop(adapter.digest, None) or self._loaded.get(adapter.digest)
            if loaded is None:  # on a rank that has not been asked to read it
                loaded = self.model_adapters.load(adapter.path, adapter.digest)
            self.num_changes += self.model_adapters.put(slot, loaded)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
