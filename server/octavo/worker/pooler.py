"""Results of requests beside tokens: vectors pooled from the model's last hidden states, and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.gguf.weights import gguf_tensor
from octavo.interface.engine_config import ModelConfig
from octavo.interface.pooling import DenseModule, NormModule, Pooling, parts_of
from octavo.layers.encoder import HeadLinear, HeadNorm
from octavo.layers.weights import WeightSource
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo.models.base import CausalLM
from octavo.sample import devices
from octavo.worker.host_copy import HostCopy
from octavo.worker.input_batch import StepInputs

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class PoolingHead(nn.Module):
    """Turns pooled sequences into results: the model's dense layers, cuts and lengths, or classes."""

    def __init__(self, config: ModelConfig, device: torch.device, classify: Callable[[Tensor], Tensor]) -> None:
        """``classify``: logits [S, classes] of rows [S, H]. Raises ModelError for dense layers of other sizes."""
        super().__init__()
        self._config, self._classify = config.pooler, classify
        first = config.hidden_size * len(parts_of(config.pooler.pooling))
        sizes = [first, *(module.outputs for module in config.pooler.dense)]
        for module, size in zip(config.pooler.dense, sizes, strict=False):
            if module.inputs != size:
                raise ModelError(
                    f"{config.model}: the layer {module.path} takes {module.inputs} numbers, what comes before "
                    f"it gives {size}; fetch the model again"
                )
        with torch.device(device):
            self.dense = nn.ModuleList(map(_load, config.pooler.dense))
        kinds = [module.activation if isinstance(module, DenseModule) else "identity" for module in config.pooler.dense]
        self._activations = [_ACTIVATIONS[kind] for kind in kinds]

    def start(
        self, poolings: Sequence[Pooling], pooled: Callable[[list[int], Pooling], Tensor]
    ) -> list[Callable[[], list[float]]]:
        """Return a call for each of ``poolings`` that waits for its result. ``pooled`` gives the vectors ``[S, W]`` of
        those at some places, which are pooled alike."""
        calls: list[Callable[[], list[float]]] = [list] * len(poolings)
        groups: dict[Pooling, list[int]] = {}
        for place, pooling in enumerate(poolings):
            groups.setdefault(pooling, []).append(place)
        for pooling, places in groups.items():
            some = pooled(places, pooling)
            result = self._vectors(some, pooling) if pooling.task == "embed" else self._classes(some, pooling)
            read = _Rows(result)
            for number, place in enumerate(places):
                calls[place] = partial(read.row, number)
        return calls

    def _vectors(self, x: Tensor, pooling: Pooling) -> Tensor:
        for dense, activation in zip(self.dense, self._activations, strict=True):
            x = activation(dense(x))
        x = x[:, : pooling.dimensions]
        return nn.functional.normalize(x, dim=1).float() if pooling.activate else x.float()

    def _classes(self, x: Tensor, pooling: Pooling) -> Tensor:
        logits = self._classify(x).float()
        kind = self._config.activation if pooling.activate else "identity"
        if kind == "identity":
            return logits
        return logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=1)


class _Rows:
    """The rows of a result, copied to the host once for all who ask."""

    def __init__(self, result: Tensor) -> None:
        self._copy: HostCopy | None = HostCopy([result])
        self._rows: list[list[float]] = []

    def row(self, number: int) -> list[float]:
        """Waits for the copy."""
        if self._copy is not None:
            self._rows, self._copy = self._copy.wait()[0].tolist(), None
        return self._rows[number]


class StepRows:
    """The rows ``hidden [T, H]`` of a step's whole texts: ``lengths`` of each, from ``starts`` on (int64 [S], on the
    host, which needs them: to ask a device for a number of rows would be to wait for it).

    Sums are float64 and in the order of the rows.
    """

    def __init__(self, hidden: Tensor, starts: Tensor, lengths: Tensor) -> None:
        self._hidden, self._starts, self._lengths = hidden, starts, lengths
        self._made: dict[tuple[str, int], Tensor] = {}  # of all texts

    def pooled(self, texts: Sequence[int], pooling: Pooling) -> Tensor:
        """Pool ``texts``, given by their places in rising order: float64 ``[len(texts), kinds of pooling * H]``."""
        whole = torch.cat([self._kind(kind, pooling.left_out) for kind in parts_of(pooling.pooling)], dim=1)
        return whole if len(texts) == len(whole) else whole[self._put(torch.tensor(texts))]

    def _put(self, host: Tensor) -> Tensor:
        return devices.put(host, self._hidden.device)

    def _kind(self, kind: str, left_out: int) -> Tensor:
        found = self._made.get((kind, left_out))
        if found is None:
            found = self._made[kind, left_out] = self._pool(kind, left_out)
        return found

    def _pool(self, kind: str, left_out: int) -> Tensor:
        """One kind of all texts; what comes of those that have no more than ``left_out`` rows is not used."""
        starts, lengths = self._starts, self._lengths
        if kind == "last":
            return self._hidden[self._put(starts + lengths - 1)].double()
        if kind == "cls":
            return self._hidden[self._put(starts + (lengths - 1).clamp(max=left_out))].double()
        x = self._hidden[: int(lengths.sum())].double()
        if left_out or kind == "weightedmean":
            places = torch.arange(len(x)) - starts.repeat_interleave(lengths)
            if kind == "weightedmean":
                x = x * self._put(places + 1)[:, None]
            if left_out:
                x, lengths = x[self._put((places >= left_out).nonzero()[:, 0])], (lengths - left_out).clamp(min=0)
        # Unsafe: it does not look at the lengths, which are right.
        way = kind if kind in ("mean", "max") else "sum"
        reduced = torch.segment_reduce(x, way, lengths=self._put(lengths), unsafe=True)
        return reduced if way == kind else reduced / self._put(divisor(kind, self._lengths, left_out))[:, None]


def divisor(kind: str, lengths: Tensor, left_out: int) -> Tensor:
    """Return what the sums of sequences of ``lengths`` int64, of which the first ``left_out`` are not in them, are
    divided by: float64."""
    if kind == "weightedmean":
        return (lengths * (lengths + 1) - left_out * (left_out + 1)) / 2.0
    exact = (lengths - left_out).double()
    return exact.sqrt() if kind == "mean_sqrt_len" else exact


class _Chunks:
    """The state that is kept of a prompt's chunks: a float64 vector ``[H]`` for each kind of its pooling."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._seen = 0
        self._held: dict[str, Tensor] = {}

    def add(self, chunk: Tensor) -> None:
        """``chunk [t, H]`` follows what was added."""
        begin = max(self._seen, self.pooling.left_out)
        rows = chunk[begin - self._seen :].double()
        self._seen += len(chunk)
        if len(rows):
            for kind in parts_of(self.pooling.pooling):
                self._held[kind] = _added(kind, self._held.get(kind), rows, begin)

    def pooled(self) -> Tensor:
        """Float64 ``[kinds of pooling * H]``."""
        seen, left_out = torch.tensor(self._seen), self.pooling.left_out
        parts = [
            held if kind in ("cls", "last", "max") else held / float(divisor(kind, seen, left_out))
            for kind, held in self._held.items()
        ]
        return torch.cat(parts)


def _added(kind: str, held: Tensor | None, rows: Tensor, begin: int) -> Tensor:
    """The vector that one ``kind`` keeps after ``rows``, the first of which is at ``begin`` in its sequence."""
    if kind == "last":
        return rows[-1].clone()
    if kind == "cls":
        return rows[0].clone() if held is None else held
    if kind == "max":
        largest = rows.amax(0)
        return largest if held is None else largest.maximum(held)
    if kind == "weightedmean":
        rows = rows * torch.arange(begin + 1, begin + len(rows) + 1, device=rows.device)[:, None]
    return rows.sum(0) if held is None else held + rows.sum(0)


class Pooler:
    """Pools each prompt of a decoder over its chunks, until the last one is computed.

    Sums are float64, so that they do not depend on how prompts are cut.
    """

    def __init__(self, head: PoolingHead) -> None:
        self._head = head
        self._prompts: dict[str, _Chunks] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._prompts

    def add(self, req_id: str, pooling: Pooling) -> None:
        """Expect a prompt's chunks."""
        self._prompts[req_id] = _Chunks(pooling)

    def remove(self, req_id: str) -> None:
        """Forget a prompt; unknown ones are ignored."""
        self._prompts.pop(req_id, None)

    def start(
        self, req_ids: list[str], inputs: StepInputs, hidden: Tensor, ended: set[str]
    ) -> Iterator[tuple[str, Callable[[], list[float]]]]:
        """Add a step's chunks, ``hidden [T, H]``. Of each prompt in ``ended``: a call that waits for its result."""
        done: list[str] = []
        for i, req_id in enumerate(req_ids):
            if req_id not in self._prompts:
                continue
            self._prompts[req_id].add(hidden[int(inputs.starts[i]) : int(inputs.starts[i + 1])])
            if req_id in ended:
                done.append(req_id)
        if done:
            vectors = [self._prompts[req_id].pooled() for req_id in done]
            poolings = [self._prompts[req_id].pooling for req_id in done]
            calls = self._head.start(poolings, lambda places, _: torch.stack([vectors[place] for place in places]))
            yield from zip(done, calls, strict=True)


def classify(model: CausalLM, token_ids: Sequence[int], pooled: Tensor) -> Tensor:
    """Logits ``[S, classes]`` of a decoder's last states ``pooled [S, H]``: its head's or, of one that answers in one
    of two tokens, how much likelier the second is, ``[S, 1]``."""
    rows = -(-len(pooled) // model.row_multiple) * model.row_multiple
    padded = nn.functional.pad(pooled, (0, 0, 0, rows - len(pooled))).to(getattr(torch, model.config.dtype))
    logits = model.compute_logits(padded)[: len(pooled)].float()
    if not token_ids:
        return logits
    no, yes = (logits[:, token_id] for token_id in token_ids)
    return (yes - no)[:, None]


def _load(module: DenseModule | NormModule) -> HeadLinear | HeadNorm:
    layer: HeadLinear | HeadNorm
    if isinstance(module, NormModule):
        layer, prefix = HeadNorm(module.size), "norm."
    else:
        layer, prefix = HeadLinear(module.inputs, module.outputs, module.bias), "linear."
    tensors: dict[str, WeightSource]
    if isinstance(module, DenseModule) and module.tensor is not None:
        tensors = {"weight": gguf_tensor(module.path, module.tensor)}
    else:
        tensors = {source.name.removeprefix(prefix): source for source in SafetensorsFile(module.path).sources()}
    for slot in layer.weight_slots():
        if slot.leaf not in tensors:
            raise ModelError(f"{module.path} lacks {prefix}{slot.leaf}; fetch the model again")
        slot.check(tensors[slot.leaf])
        slot.load(tensors[slot.leaf])
    return layer
