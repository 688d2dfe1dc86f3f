"""Ranks that have a GPU of one machine each, by number: they read each other's memory where they can, else NCCL moves
tensors. Either way sums are in the order of ranks, and the bits are the same.

Nothing listens on a network: processes meet in a folder, and NCCL is told to use the loopback interface.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    FileStore,
    PrefixStore,
    Store,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from octavo.interface.engine_config import EngineConfig
from octavo.layers.parallel import TorchGroup
from octavo_kernels.gpu_parts import is_on
from octavo_kernels.triton.exchange import Exchange, all_gather, all_reduce_, best_of_ranks, region_bytes

logger = logging.getLogger(__name__)

_ACCESS, _NATIVE_ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_..._SUPPORTED
_POLL_SECONDS = 0.02
_REPORT_SECONDS = 1.0  # for programs that wait, to see that they shall not, and to say for whom


class MappedGroup:
    """A `Group` of GPUs that have mapped a region of each other's memory. Its calls can be captured."""

    def __init__(self, exchange: Exchange, host: Tensor, store: Store, keep: object = None) -> None:
        """``host`` int32 [1 + ranks]: see `Exchange`. ``store``: for what is exchanged at start. ``keep``: as long as
        this."""
        self._exchange, self._host, self._store, self._keep = exchange, host.numpy(), store, keep
        self.rank, self.ranks, self.device_bytes = exchange.rank, exchange.ranks, region_bytes()
        self._num_smallest = 0

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Group`."""
        all_reduce_(x, self._exchange)
        return x if dtype is None else x.to(dtype)

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        """See `Group`."""
        return all_gather(x, total, self._exchange)

    def best(self, index: Tensor | None, value: Tensor | None, offset: int, rows: int) -> tuple[Tensor, Tensor]:
        """See `Group`; values float64."""
        device = self._exchange.addresses.device
        if index is None or value is None:
            index = torch.full((rows,), -1, dtype=torch.int64, device=device)
            value = torch.zeros(rows, dtype=torch.float64, device=device)
        else:
            index, value = index + offset, value.double()
        return best_of_ranks(index, value, self._exchange)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """See `Group`."""
        self._num_smallest += 1
        keys = [f"smallest {self._num_smallest} {rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], " ".join(map(str, numbers)))
        for key in keys:
            while not self._store.check([key]):
                self.check()
                time.sleep(_POLL_SECONDS)
        found = [self._store.get(key).split() for key in keys]
        return [min(map(int, column)) for column in zip(*found, strict=True)]

    def check(self) -> None:
        """See `Group`."""
        if self._host[0]:
            late = ", ".join(f"rank {rank}" for rank in self._waited_for()) or "a rank"
            raise RuntimeError(f"{late} did not take part in an exchange, rank {self.rank} waited")

    def stop(self) -> None:
        """See `Group`."""
        self._host[0] = 1

    @property
    def late(self) -> list[int]:
        """See `Group`. What waits on the device is the one to know: asking ends it."""
        self.stop()
        until = time.monotonic() + _REPORT_SECONDS
        while not (found := self._waited_for()) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return found

    def _waited_for(self) -> list[int]:
        return [rank for rank in range(self.ranks) if self._host[1 + rank]]


def open_device_group(
    config: EngineConfig, rank: int, folder: Path, check: Callable[[], None] = lambda: None
) -> MappedGroup | TorchGroup:
    """The group of rank ``rank``, whose GPU is from now on this thread's current one; all ranks call this, and meet in
    ``folder``. ``check`` raises once there is no use in waiting. Raises RuntimeError where one does not come in time.
    """
    parallel = config.parallel
    ranks, timeout = parallel.world_size, timedelta(seconds=parallel.distributed_timeout_seconds)
    torch.cuda.set_device(rank)
    store = FileStore(str(folder / "store"), ranks)
    store.set_timeout(timeout)
    wait_for_all = partial(_wait_for_all, rank=rank, ranks=ranks, seconds=timeout.total_seconds(), check=check)
    wait_for_all(store)
    group = dist.ProcessGroup(PrefixStore("torch", store), rank, ranks)
    if not parallel.disable_custom_all_reduce and is_on("exchange") and _can_map_each_other(ranks):
        mapped, problem = None, ""
        try:
            mapped = _map(group, PrefixStore("octavo", store), f"octavo {folder.name}")
        except RuntimeError as error:  # in containers, for one, without a socket or the fabric's manager
            problem = f"rank {rank}: {error}"
        # Those that wait in torch for one that could not map anything began later than it did.
        told = wait_for_all(PrefixStore("mapped", store), seconds=2 * timeout.total_seconds(), value=problem)
        problems = list(filter(None, told))
        if mapped is not None and not problems:
            logger.info("ranks add up what they read of each other's memory")
            return mapped
        logger.warning("ranks cannot map each other's memory (%s)", problems[0])
        del mapped
    return _nccl(group, timeout)


def _wait_for_all(
    store: Store, rank: int, ranks: int, seconds: float, check: Callable[[], None], value: str = ""
) -> list[str]:
    """Tell the others ``value``; return every rank's."""
    store.set(f"rank {rank}", value)
    until = time.monotonic() + seconds
    while missing := [name for other in range(ranks) if not store.check([name := f"rank {other}"])]:
        check()
        if time.monotonic() > until:
            raise RuntimeError(f"{', '.join(missing)} did not come to the others within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return [store.get(f"rank {other}").decode() for other in range(ranks)]


def _map(group: dist.ProcessGroup, store: Store, name: str) -> MappedGroup:
    """Map memory with torch's symmetric memory, which passes handles over Unix sockets. ``name`` must be unique among
    groups."""
    rank, ranks, device = group.rank(), group.size(), torch.device("cuda", torch.cuda.current_device())
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # which nothing here uses, and containers may forbid
    # torch looks the group up here; the place has changed between versions.
    _SymmetricMemory.set_group_info(name, rank, ranks, PrefixStore("symmetric", store))
    _register_process_group(name, group)  # type: ignore[arg-type]  # a string as well
    try:
        region = _SymmetricMemory.empty_strided_p2p((region_bytes(),), (1,), torch.uint8, device, name)
        region.zero_()
        torch.cuda.synchronize(device)
        handle = _SymmetricMemory.rendezvous(region)
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]
    if handle.buffer_ptrs[rank] != region.data_ptr():
        raise RuntimeError("torch's symmetric memory is not where its tensor is: --disable-custom-all-reduce")
    host = torch.zeros(1 + ranks, dtype=torch.int32).pin_memory()
    addresses = torch.tensor([*handle.buffer_ptrs, host.data_ptr()], dtype=torch.int64, device=device)
    return MappedGroup(Exchange(addresses, rank, ranks), host, store, (region, handle))


def _nccl(group: dist.ProcessGroup, timeout: timedelta) -> TorchGroup:
    """Create an NCCL group and reduce with it once, so that its lazy setup precedes any capture."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # rank 0 looks after them, and says who is late
    store, kind = group.get_group_store(), dist.ProcessGroup.BackendType.NCCL
    backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    found = TorchGroup(group, device)
    for size in (1, found.one_shot_bytes):
        found.all_reduce(torch.zeros(size, device=device))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    found.device_bytes = max(0, free - torch.cuda.mem_get_info(device)[0])
    logger.info("ranks exchange through NCCL and add up in their order")
    return found


def _can_map_each_other(ranks: int) -> bool:
    """True if each GPU can read and atomically write every other's memory, by the driver; without atomics, as over
    PCIe, ranks could not meet in it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int()
    if cuda.cuInit(0):
        return False
    for first, second in permutations(range(ranks), 2):
        for attribute in (_ACCESS, _NATIVE_ATOMICS):
            if cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, first, second) or not value.value:
                return False
    return True
