"""LoRA adapters of a loaded model: which layer takes which matrices, and in which form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ConfigError, ModelError
from octavo.interface.engine_config import LoRAConfig
from octavo.layers.embedding import PackedTable, VocabParallelEmbedding
from octavo.layers.fusion import fuse_neighbours
from octavo.layers.lora import AdapterRows, LayerAdapters
from octavo.layers.quantization.base import ExpertsBase, LinearBase, Shard
from octavo.layers.weights import WeightSource
from octavo.loader.base_copies import check_copies
from octavo.loader.lora_files import read_adapter
from octavo.loader.matrices import Matrices
from octavo.models.base import CausalLM
from octavo_kernels import AdapterTable, SlotMemory
from octavo_kernels.weight_memory import own_memory

# Families whose queries, keys and values lie in another order in GGUF files than adapters have them.
_OTHERWISE_IN_GGUF = ("FalconForCausalLM", "GPTNeoXForCausalLM")

_ALIGNMENT = 64  # bytes


@dataclass
class _Place:
    """Part ``part`` of a layer, which takes ``shard`` of the checkpoint module's weight."""

    layer: LinearBase | VocabParallelEmbedding
    part: int
    shard: Shard


@dataclass
class LoadedAdapter:
    """An adapter in host memory: for each layer that it changes A and B as `AdapterTable` wants them, or all as a slot
    of a `SlotMemory` holds it."""

    digest: str
    rank: int
    matrices: dict[LayerAdapters, tuple[Tensor, Tensor]] = field(default_factory=dict)
    image: Tensor | None = None


class ModelAdapters:
    """The adapters of one model, or of a rank's part of it."""

    def __init__(self, model: CausalLM, config: LoRAConfig, device: torch.device | None = None) -> None:
        """Let every layer of ``model`` except experts take adapters. ``device`` holds the slots; None: slots are
        addresses in host memory."""
        files, architecture = model.config.files, model.config.architecture
        if files.format == "gguf" and architecture in _OTHERWISE_IN_GGUF:
            raise ConfigError(
                f"enable_lora: {files.model} is a GGUF file, and those of {architecture} hold attention in another "
                "order than adapters do: take the safetensors"
            )
        self._model, self._config = model, config
        self.dtype = torch.float32 if model.config.is_all_float32 else torch.bfloat16
        if device is not None:
            self.dtype = getattr(torch, model.config.dtype)  # tensor cores take both factors in one
        self.memory = None if device is None else SlotMemory(config.max_loras, config.max_lora_rank, self.dtype)
        self._is_fused = model.is_quantized and (device is None or device.type == "cpu")
        self.rows = AdapterRows()
        self._experts = {id(m) for layer in model.modules() if isinstance(layer, ExpertsBase) for m in layer.modules()}
        self._places: dict[str, list[_Place]] = {}
        self._layers: dict[LayerAdapters, nn.Module] = {}
        for path, module in model.named_modules():
            if id(module) in self._experts or isinstance(module, PackedTable):
                continue
            if isinstance(module, LinearBase):
                sizes = [shard.num_rows for shard in module.shards]
                sizes[-1] += module.output_size - sum(sizes)  # rows of a vocabulary without a token
                self._add(path, module, sizes, module.shards)
            elif isinstance(module, VocabParallelEmbedding):
                self._add(path, module, [module.shard.shape[1]], [module.shard])
        if self.memory is not None and device is not None:
            self.memory.allocate(device)

    def _add(
        self, path: str, layer: LinearBase | VocabParallelEmbedding, sizes: list[int], shards: list[Shard]
    ) -> None:
        config = self._config
        if self.memory is None:
            table = AdapterTable(config.max_loras, config.max_lora_rank, sizes, self.dtype)
        elif isinstance(layer, LinearBase):
            table = self.memory.add(sizes, layer.input_size)
        else:
            table = self.memory.add(sizes, layer.shard.num_rows, is_embedding=True)
        adapters = layer.adapters = LayerAdapters(self.rows, table)
        self._layers[adapters] = layer
        parent, dot, own = path.rpartition(".")
        names = self._model.packed_modules_mapping.get(own, [own])
        for part, shard in enumerate(shards):
            name = f"{parent}{dot}{names[part] if len(names) == len(shards) else own}"
            self._places.setdefault(name, []).append(_Place(layer, part, shard))

    @property
    def num_bytes(self) -> int:
        """Return the memory of all slots on the device."""
        return 0 if self.memory is None else self._config.max_loras * self.memory.num_bytes

    def load(self, path: str, digest: str = "") -> LoadedAdapter:
        """Read an adapter. Raises ModelError, of one line, for one that is damaged, does not fit the model, or asks for
        what is not computed here, and where its files have another ``digest`` than when it was first read."""
        most = 4 * self._config.max_lora_rank * sum(sum(p[0].shard.shape) for p in self._places.values())
        model = self._model.config
        most += 2 * 8 * model.vocab_size * model.hidden_size  # copies of tables
        heads = model.num_heads, model.num_kv_heads
        file = read_adapter(path, self._config.max_lora_rank, most, heads)
        if digest and file.digest != digest:
            raise ModelError(f"{path} has changed since the adapter was loaded: load it again")
        check_copies(file.copies, self._model, path)
        parts: dict[LayerAdapters, dict[int, tuple[Tensor, Tensor]]] = {}
        for pair in file.pairs:
            a = pair.a.load(torch.float32)
            for places, source in self._parts_of(pair, path):
                b = source.load(torch.float32) * pair.scaling
                for place in places:
                    assert place.layer.adapters is not None
                    parts.setdefault(place.layer.adapters, {})[place.part] = _cut(a, b, place)
        rank = max(pair.a.shape[0] for pair in file.pairs)
        matrices = {layer: self._merged(layer, parts[layer]) for layer in self._layers if layer in parts}
        if self.memory is None:
            return LoadedAdapter(file.digest, rank, _together(matrices))
        return LoadedAdapter(
            file.digest, rank, image=self.memory.image([matrices.get(layer) for layer in self._layers])
        )

    def _parts_of(self, pair: Matrices, path: str) -> Iterator[tuple[list[_Place], WeightSource]]:
        """Locate a pair's A and B: B is in parts if the model has the checkpoint's weight in several."""
        if ".experts." in f"{pair.module}.{self._model.weight_name(pair.module)}.":
            raise ModelError(f"{path}: {pair.module!r} is of a layer of experts: not supported yet")
        for name, b in self._model.experts_apart(f"{pair.module}.weight", pair.b, self._model.config):
            module = (self._model.weight_name(name) or "").removesuffix(".weight")
            places = self._places.get(module)
            if places is None:
                raise ModelError(f"{path}: {self._why_not(pair.module, module)}")
            of_embedding = isinstance(places[0].layer, VocabParallelEmbedding)
            outputs, inputs = b.shape[0], pair.a.shape[1]
            shape, given = places[0].shard.shape, (inputs, outputs) if of_embedding else (outputs, inputs)
            if given != shape or of_embedding != pair.of_embedding:
                raise ModelError(
                    f"{path}: A and B of {pair.module!r} are for a weight of {list(given)}, "
                    f"{self._model.config.model} has {list(shape)}; is the adapter another model's?"
                )
            yield places, b

    def _why_not(self, given: str, module: str) -> str:
        """Explain why there is no place for matrices of the checkpoint's module ``given``, here ``module``."""
        parent, _, own = module.rpartition(".")
        if hasattr(dict(self._model.named_modules()).get(parent), own):
            return f"adapters of {given!r} are not supported yet; train one without {own}"
        return f"{self._model.config.model} has no place for {given!r}; is the adapter another model's?"

    def _merged(self, layer: LayerAdapters, parts: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """A and B of all parts of a layer, those that the adapter leaves alone as zeros."""
        table = layer.table
        rank = max(len(b) for _, b in parts.values())
        sizes = table.offsets.diff().tolist()
        if isinstance(self._layers[layer], VocabParallelEmbedding):
            ((a, b),) = parts.values()
        else:
            width = next(iter(parts.values()))[0].shape[1]
            a, b = torch.zeros(table.parts * rank, width), torch.zeros(rank, sum(sizes))
            for part, (own_a, own_b) in parts.items():
                a[part * rank : part * rank + len(own_a)] = own_a
                b[: len(own_b), table.offsets[part] : table.offsets[part] + own_b.shape[1]] = own_b
        return a.to(self.dtype), b.to(self.dtype)

    def put(self, slot: int, adapter: LoadedAdapter) -> bool:
        """Bring an adapter into a slot; whether layers take adapters from now on that did not before."""
        before = sum(layer.has_any for layer in self._layers)
        for layer in self._layers:
            layer.put(slot, adapter.matrices.get(layer))
        return sum(layer.has_any for layer in self._layers) > before

    @contextmanager
    def applied(self, slots: Tensor) -> Iterator[None]:
        """A forward pass of rows with these ``slots`` int32 ``[T]``, -1: none."""
        if self._is_fused:
            fuse_neighbours(self._model, {module for layer, module in self._layers.items() if layer.has_any})
        self.rows.slots, self.rows.tiles = slots, octavo_kernels.lora_tiles(slots, self._config.max_loras)
        try:
            yield
        finally:
            self.rows.slots = self.rows.tiles = None
            if self._is_fused:
                fuse_neighbours(self._model)


def _together(matrices: dict[LayerAdapters, tuple[Tensor, Tensor]]) -> dict[LayerAdapters, tuple[Tensor, Tensor]]:
    """The matrices one after the other, in the order in which a step reads them."""
    total = sum(tensor.nbytes + -tensor.nbytes % _ALIGNMENT for pair in matrices.values() for tensor in pair)
    memory, at = own_memory(total), 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal at
        room = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        return room.copy_(tensor)

    return {layer: (place(a), place(b)) for layer, (a, b) in matrices.items()}


def _cut(a: Tensor, b: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
    """This rank's parts of ``a [R, K]`` and ``b [N, R]`` of a checkpoint module: ``[R, k]`` and ``[R, n]``, or of an
    embedding ``[v, R]`` and ``[R, H]``."""
    shard = place.shard
    if isinstance(place.layer, VocabParallelEmbedding):
        return a.T[shard.rows], b.T
    rows = b if shard.order is None else b[shard.order]
    return a[:, shard.columns], rows[shard.rows].T
