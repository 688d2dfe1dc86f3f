"""LoRA adapters in a worker: read in a thread, kept in host memory, brought into slots between steps."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from octavo.interface.engine_config import EngineConfig, LoRAConfig
from octavo.interface.lora import Adapter
from octavo.loader.lora import LoadedAdapter, ModelAdapters
from octavo.models.base import CausalLM
from octavo_kernels import SlotMemory

logger = logging.getLogger(__name__)


def make_adapters(model: CausalLM, config: EngineConfig, device: torch.device | None) -> AdapterManager | None:
    """None where ``config`` has none. ``device``: of the runner of GPUs. Raises ConfigError."""
    return None if config.lora is None else AdapterManager(model, config.lora, device)


def slots_at(slots: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Pick the slots of the tokens ``indices`` int64 [R] from those of a step's, ``slots`` int32 [T]; -1 of its
    padding."""
    found = np.full(len(indices), -1, dtype=np.int32)
    real = indices < len(slots)
    found[real] = slots[indices[real]]
    return found


class SlotCopies:
    """Fills the slots of ``memory`` beside the steps under way. A CPU needs no order: it does one thing at a time.

    Copies have a stream of their own: a copy waits there for the last step that reads the slot, and the first step that
    reads it afterwards waits on its own stream for the copy. The host waits for neither.
    """

    def __init__(self, memory: SlotMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # on which the slots have been emptied
        self._reading = set[int]()  # by the last step
        self._read = dict[int, torch.cuda.Event]()  # when a slot's last step before that is done
        self._filled = dict[int, torch.cuda.Event]()  # slots that no step has read since

    def fill(self, slot: int, image: Tensor) -> None:
        """Have an adapter's `SlotMemory.image` copied into a slot. Memory that is pinned is kept until it is read."""
        if self._stream is None:
            self._memory.fill(slot, image)
            return
        self._end_step()
        if slot in self._read:
            self._stream.wait_event(self._read.pop(slot))
        with torch.cuda.stream(self._stream):
            self._memory.fill(slot, image)
            self._filled[slot] = torch.cuda.Event()
            self._filled[slot].record()

    def begin_step(self, slots: Iterable[int]) -> None:
        """Mark these slots as read by everything launched from now on."""
        if self._stream is None:
            return
        self._end_step()
        for slot in slots:
            self._reading.add(slot)
            if slot in self._filled:
                torch.cuda.current_stream().wait_event(self._filled.pop(slot))

    def _end_step(self) -> None:
        """All that has been launched so far is of steps before."""
        if self._reading:
            done = torch.cuda.Event()
            done.record()
            self._read |= dict.fromkeys(self._reading, done)
            self._reading.clear()


class AdapterManager:
    """Keeps up to ``max_cpu_loras`` adapters in host memory, the least recently used goes first. Those in slots stay in
    use all the same."""

    def __init__(self, model: CausalLM, config: LoRAConfig, device: torch.device | None = None) -> None:
        """``device``: see `ModelAdapters`."""
        self.model_adapters = ModelAdapters(model, config, device)
        memory = self.model_adapters.memory
        self.copies = None if memory is None or device is None else SlotCopies(memory, device)
        self._capacity = config.max_cpu_loras
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # by digest
        # Adapters to bring into slots, whatever else is read meanwhile: no more than there are slots.
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
        with self._lock:
            known = self._loaded.get(adapter.digest)  # since it was asked for
        with torch.inference_mode():
            loaded = known or self.model_adapters.load(adapter.path, adapter.digest)
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
            loaded = self._take(adapter.digest)
            if loaded is None:  # on a rank that is still reading it, while the first one is not
                self._thread.submit(self._load, adapter).result()
                loaded = self._take(adapter.digest)
                assert loaded is not None
            if self.copies is None:
                self.num_changes += self.model_adapters.put(slot, loaded)
            else:
                assert loaded.image is not None
                self.copies.fill(slot, loaded.image)

    def _take(self, digest: str) -> LoadedAdapter | None:
        with self._lock:
            return self._kept.pop(digest, None) or self._loaded.get(digest)

    def begin_step(self, slots: np.ndarray) -> None:
        """Prepare a GPU's next step, whose rows have the adapters in ``slots`` int32 [R], -1: none."""
        if self.copies is not None:
            self.copies.begin_step(set(slots[slots >= 0].tolist()))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
