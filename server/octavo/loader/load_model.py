"""Building a model and filling it.

Parameters are made empty, in the dtype of computation and on the device; then each tensor of the checkpoint is read
to its place, so that the peak of host memory is the model and one tensor. Several threads read at once, a tensor each:
that hides the waiting for a disk or network, and unlike torch's own threads they do not wait for one another.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.decoder import Elsewhere
from octavo.layers.embedding import PackedTable, ParallelLMHead, VocabParallelEmbedding
from octavo.layers.fusion import fuse_neighbours
from octavo.layers.latent_attention import absorb_weights
from octavo.layers.linear import ExactLinear
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization import exact_method, quantization_config
from octavo.layers.quantization.base import ExpertsBase, LinearBase, QuantizationConfig
from octavo.layers.quantization.weight_format import StoredModule
from octavo.layers.weights import WeightSlot
from octavo.loader.checkpoint import linear_modules, stored_weights
from octavo.loader.dummy import dummy_weights
from octavo.models.base import CausalLM, Model
from octavo.models.registry import model_class
from octavo.models.stages import keep_stage
from octavo.system.limits import large_memory_returned

if TYPE_CHECKING:
    from octavo.layers.weights import WeightSource

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")


def load_model(
    config: ModelConfig, load_format: str = "auto", device: torch.device | str = "cpu", tp: TensorParallel | None = None
) -> Model:
    """The model of ``config`` with its weights, ready to run. ``load_format`` "dummy" fills it with random numbers.

    Raises ModelError when the architecture is unknown or when config.json and the checkpoint do not match.
    """
    stored = stored_weights(config, load_format)
    model = build_model(config, device, tp or TensorParallel(), stored)
    if model.leaves_out:
        logger.info("%s runs as a text model: %s are left out", config.architecture, model.leaves_out)
    taken: list[tuple[WeightSlot, WeightSource]]
    if load_format == "dummy":
        slots = weight_slots(model)
        taken = [(slot, source) for name, source in dummy_weights(slots, config.seed, device) for slot in slots[name]]
    else:
        taken = taken_weights(model, stored, config)
    with large_memory_returned():
        fill(taken)
        for module in model.modules():
            if isinstance(module, LinearBase):
                module.method.process_weights_after_loading(module)
        for module in model.modules():
            if isinstance(module, ExpertsBase):
                module.method.process_weights_after_loading(module)
        absorb_weights(model)
    fuse_neighbours(model)
    return model


def build_model(
    config: ModelConfig,
    device: torch.device | str,
    tp: TensorParallel,
    stored: Sequence[tuple[str, WeightSource]] | None = None,
    *,
    without_memory: bool = False,
    measured: bool = False,
) -> Model:
    """The model with empty parameters: no memory is touched yet. ``stored``: the checkpoint's tensors, unread (None:
    looked up). ``without_memory``: none is even asked for, the parameters are torch's meta tensors of the shapes and
    dtypes that they have on ``device``. ``measured``: of experts that are stored alike there is one."""
    cls = model_class(config.architecture)
    modules = linear_modules(stored_weights(config) if stored is None else stored, cls.weight_name)
    quantization = quantization_config(config, device, modules, cls.packed_modules_mapping)
    dtype = getattr(torch, config.dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta" if without_memory else device):
            model = cls(config, tp)
            if tp.stage.size > 1:
                assert isinstance(model, CausalLM)
                keep_stage(model)
            if tp.replicas is not None:
                assert isinstance(model, CausalLM)
                model.share_experts()
            for name, module in list(model.named_modules()):
                if isinstance(module, LinearBase):
                    module.stored_types = [_stored_type(modules, part) for part in _part_paths(model, name, module)]
                    module.has_many_rows = config.is_encoder
                    exact = isinstance(module, ExactLinear)
                    method = exact_method(config, device) if exact else quantization.linear_method(name, module)
                    module.create_weights(method, dtype)
                elif isinstance(module, ExpertsBase):
                    module.stored_types = [
                        {part: _stored_type(modules, f"{name}.{number}.{part}") for part in module.projections}
                        for number in range(module.settings.num_experts)
                    ]
                    if measured:
                        _keep_one_expert(module, name, modules)
                    module.create_weights(quantization.moe_method(name, module), dtype)
            if isinstance(model, CausalLM):
                pack_embeddings(model, quantization, modules)
    except KeyError as error:
        raise ModelError(f"{config.model}: config.json lacks {error}, which {config.architecture} needs") from error
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def pack_embeddings(model: CausalLM, quantization: QuantizationConfig, modules: Mapping[str, StoredModule]) -> None:
    """Hold tables of tokens as linear layers' weights would be held, where that takes less memory; a tied head has seen
    to that of its own."""
    paths = {module: name for name, module in model.named_modules()}
    tied_to = model.lm_head.tied_to if isinstance(model.lm_head, ParallelLMHead) else None
    for embedding in model.model.token_tables():
        if isinstance(embedding, VocabParallelEmbedding) and tied_to is not embedding:
            layer = PackedTable([embedding.shard], False, embedding.tp)
            layer.stored_types = [_stored_type(modules, paths[embedding])]
            embedding.pack(quantization.linear_method(paths[embedding], layer), layer)


def _keep_one_expert(layer: ExpertsBase, path: str, modules: Mapping[str, StoredModule]) -> None:
    """Let the first of experts stand for all of them, unless the checkpoint stores these in several ways: building
    thousands takes seconds."""
    ways = set()
    for number in layer.numbers:
        parts = {part: modules.get(f"{path}.{number}.{part}") for part in layer.projections}
        tensors = ((part, module.tensors) for part, module in parts.items() if module is not None)
        ways.add(frozenset((part, leaf, one.qtype, one.shape) for part, own in tensors for leaf, one in own.items()))
    if len(ways - {frozenset()}) < 2:
        layer.stands_for, layer.numbers = len(layer.numbers), layer.numbers[:1]
        layer.stored_types = [layer.stored_types[layer.numbers.start]] * layer.settings.num_experts


def _part_paths(model: Model, path: str, layer: LinearBase) -> list[str]:
    """The module paths of the checkpoint modules that the layer at ``path`` holds, part by part."""
    if isinstance(layer, ParallelLMHead) and layer.is_tied:
        return [next(name for name, module in model.named_modules() if module is layer.tied_to)]
    parent, dot, own = path.rpartition(".")
    return [parent + dot + part for part in model.packed_modules_mapping.get(own, [own])]


def _stored_type(modules: Mapping[str, StoredModule], path: str) -> str | None:
    weight = modules[path].tensors.get("weight") if path in modules else None
    return None if weight is None else weight.qtype


def weight_slots(model: Model) -> dict[str, list[WeightSlot]]:
    """Map each weight's name to the slot that takes its tensor (see `Model`)."""
    slots: dict[str, list[WeightSlot]] = {}
    packed = model.packed_modules_mapping
    for path, module in model.named_modules():
        if not hasattr(module, "weight_slots"):
            continue
        parent, _, own = path.rpartition(".")
        parts = packed.get(own, [own])
        for slot in module.weight_slots():
            name = ".".join(filter(None, (parent, parts[slot.part], slot.leaf)))
            slots.setdefault(name, []).append(slot)
    return slots


def taken_weights(
    model: Model, stored: Iterable[tuple[str, WeightSource]], config: ModelConfig
) -> list[tuple[WeightSlot, WeightSource]]:
    """The slots of ``model`` and the checkpoint's tensors for them, unread.

    Raises ModelError naming tensors that are missing, that have no place, or that have another shape or type.
    """
    slots, is_elsewhere = weight_slots(model), _elsewhere(model)
    missing = {name for name, takers in slots.items() if not all(slot.optional for slot in takers)}
    taken, unknown = [], []
    stored_names: dict[str, str] = {}
    for stored_name, source in stored:
        name = model.weight_name(stored_name)
        if name in slots:
            stored_names[name] = stored_name
            weight = model.as_weight(name, source)
            taken += [(slot, weight) for slot in slots[name]]
            missing.discard(name)
        elif name is not None and not is_elsewhere(name):
            unknown.append(stored_name)
    if missing:
        lacking = _some(_as_stored(missing, stored_names))
        way_out = ", or start with --language-model-only" if all(map(_is_of_images, missing)) else ""
        raise ModelError(f"{config.model}: the checkpoint lacks {lacking}; fetch it again{way_out}")
    if unknown:
        if all(_is_of_images(model.weight_name(name) or "") for name in unknown):
            raise ModelError(
                f"{config.model}: the encoder of images has no place for {_some(unknown)}: it is read unquantized "
                "alone; start with --language-model-only for text"
            )
        raise ModelError(
            f"{config.model}: {config.architecture} has no place for {_some(unknown)} with this configuration; "
            "the weights and the configuration are not of one model"
        )
    for slot, source in taken:
        slot.check(source)
    return taken


def _is_of_images(name: str) -> bool:
    return name.startswith("model.vision.")


def _elsewhere(model: Model) -> Callable[[str], bool]:
    """Return whether a weight belongs to a layer or an expert of another rank."""
    layers = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Elsewhere))
    dealt = {path: layer for path, layer in model.named_modules() if isinstance(layer, ExpertsBase)}

    def is_elsewhere(name: str) -> bool:
        if name.startswith(layers):
            return True
        match = _EXPERT.match(name)
        if match is None or match[1] not in dealt:
            return False
        layer, number = dealt[match[1]], int(match[2])
        return number < layer.settings.num_experts and number not in layer.numbers

    return is_elsewhere


def fill(taken: Iterable[tuple[WeightSlot, WeightSource]]) -> None:
    """Give slots their tensors, several at a time. Raises ModelError for what cannot be read."""
    jobs: list[Callable[[], None]] = []
    for slot, source in taken:
        if slot.group is None:
            jobs.append(partial(slot.load, source))
        else:
            if not slot.group.sources:
                jobs.append(slot.group.fill)
            slot.group.sources[slot.leaf] = source
    with _threads() as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def _as_stored(missing: Iterable[str], stored_names: Mapping[str, str]) -> list[str]:
    """Return the checkpoint's names of ``missing`` tensors, derived from the names of other layers; without such a
    layer, the name here. ``stored_names``: name here -> the checkpoint's."""
    alike = {_NUMBER.sub("#", name): (name, stored) for name, stored in stored_names.items()}
    found = []
    for name in sorted(missing):
        other, stored = alike.get(_NUMBER.sub("#", name), (name, name))
        same = _NUMBER.findall(other) == _NUMBER.findall(stored)
        pieces = zip_longest(_NUMBER.split(stored), _NUMBER.findall(name), fillvalue="")
        found.append("".join(map("".join, pieces)) if same else name)
    return found


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """A pool of as many threads as torch would use, each of which runs torch's operations on its own."""
    count = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    pool = ThreadPoolExecutor(min(count, _MAX_THREADS), initializer=_prepare_thread, initargs=(gpu,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(count)  # what a thread sets is also the default of threads to come


def _prepare_thread(gpu: int | None) -> None:
    torch.set_num_threads(1)
    if gpu is not None:
        torch.cuda.set_device(gpu)  # each thread has a current one


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{len(names)} tensors, such as {shown}" if len(names) > 3 else f"tensor {shown}"
