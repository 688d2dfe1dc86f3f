"""Results of requests beside tokens: vectors pooled from the model's last hidden states, and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.gguf.weights import gguf_tensor
from octavo.interface.engine_config import ModelConfig
from octavo.interface.pooling import DenseModule, Pooling
from octavo.layers.encoder import HeadLinear
from octavo.layers.weights import WeightSource
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo.models.base import CausalLM
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
        sizes = [config.hidden_size, *(module.outputs for module in config.pooler.dense)]
        for module, size in zip(config.pooler.dense, sizes, strict=False):
            if module.inputs != size:
                raise ModelError(
                    f"{config.model}: the dense layer {module.path} takes {module.inputs} numbers, what comes before "
                    f"it gives {size}; fetch the model again"
                )
        with torch.device(device):
            self.dense = nn.ModuleList(_load_dense(module) for module in config.pooler.dense)
        self._activations = [_ACTIVATIONS[module.activation] for module in config.pooler.dense]

    def start(self, pooled: Tensor, poolings: Sequence[Pooling]) -> list[Callable[[], list[float]]]:
        """Return a call for each row of ``pooled [S, H]`` that waits for its result."""
        calls: list[Callable[[], list[float]]] = [list] * len(poolings)
        groups: dict[Pooling, list[int]] = {}
        for row, pooling in enumerate(poolings):
            groups.setdefault(pooling, []).append(row)
        for pooling, rows in groups.items():
            some = pooled if len(groups) == 1 else pooled[torch.tensor(rows, device=pooled.device)]
            result = self._vectors(some, pooling) if pooling.task == "embed" else self._classes(some, pooling)
            read = _Rows(result)
            for number, row in enumerate(rows):
                calls[row] = partial(read.row, number)
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


def pool_rows(hidden: Tensor, starts: Tensor, lengths: Tensor, kinds: Sequence[str]) -> Tensor:
    """Float64 ``[S, H]`` of S whole sequences: ``starts`` and ``lengths`` int64 [S] say which rows of ``hidden [T, H]``
    each has. Sums are float64 and in the order of the rows."""
    pooled: Tensor | None = None
    for kind in set(kinds):
        if kind in ("cls", "last"):
            part = hidden[starts if kind == "cls" else starts + lengths - 1].double()
        else:
            part = _reduced(hidden[: int(lengths.sum())].double(), starts, lengths, kind)
        if pooled is None:
            pooled = part
        else:
            chosen = torch.tensor([one == kind for one in kinds], device=hidden.device)
            pooled = torch.where(chosen[:, None], part, pooled)
    assert pooled is not None
    return pooled


def _reduced(x: Tensor, starts: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """`pool_rows` of what reads all rows of a sequence."""
    if kind in ("mean", "max"):
        return torch.segment_reduce(x, kind, lengths=lengths)
    if kind == "weightedmean":
        x = x * (torch.arange(1, len(x) + 1, device=x.device) - starts.repeat_interleave(lengths))[:, None]
    return torch.segment_reduce(x, "sum", lengths=lengths) / divisor(kind, lengths)[:, None]


def divisor(kind: str, lengths: Tensor) -> Tensor:
    """Return what the sums of sequences of ``lengths`` int64 are divided by: float64."""
    if kind == "weightedmean":
        return lengths * (lengths + 1) / 2.0
    exact = lengths.double()
    return exact.sqrt() if kind == "mean_sqrt_len" else exact


class Pooler:
    """Pools each prompt of a decoder over its chunks, until the last one is computed."""

    def __init__(self, head: PoolingHead) -> None:
        self._head = head
        self._poolings: dict[str, Pooling] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._poolings)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._poolings

    def add(self, req_id: str, pooling: Pooling) -> None:
        """Expect a prompt's chunks."""
        self._poolings[req_id] = pooling

    def remove(self, req_id: str) -> None:
        """Forget a prompt; unknown ones are ignored."""
        self._poolings.pop(req_id, None)
        self._sums.pop(req_id, None)
        self._counts.pop(req_id, None)

    def start(
        self, req_ids: list[str], inputs: StepInputs, hidden: Tensor, ended: set[str]
    ) -> Iterator[tuple[str, Callable[[], list[float]]]]:
        """Add a step's chunks, ``hidden [T, H]``. Of each prompt in ``ended``: a call that waits for its result.

        Sums are float64, so that they do not depend on how prompts are cut.
        """
        done: list[str] = []
        for i, req_id in enumerate(req_ids):
            if req_id not in self._poolings:
                continue
            chunk = hidden[int(inputs.starts[i]) : int(inputs.starts[i + 1])]
            self._add(req_id, self._poolings[req_id].pooling, chunk)
            if req_id in ended:
                done.append(req_id)
        if done:
            kinds = [self._poolings[req_id].pooling for req_id in done]
            counts = [torch.tensor(self._counts.pop(req_id, 1)) for req_id in done]
            by = [float(divisor(kind, count)) for kind, count in zip(kinds, counts, strict=True)]
            pooled = torch.stack([self._sums.pop(req_id) / one for req_id, one in zip(done, by, strict=True)])
            yield from zip(done, self._head.start(pooled, [self._poolings[i] for i in done]), strict=True)

    def _add(self, req_id: str, kind: str, chunk: Tensor) -> None:
        held = self._sums.get(req_id)
        if kind in ("cls", "last"):
            if kind == "last" or held is None:
                self._sums[req_id] = chunk[-1 if kind == "last" else 0].double()
            return
        rows, before = chunk.double(), self._counts.get(req_id, 0)
        if kind == "max":
            largest = rows.amax(0)
            self._sums[req_id] = largest if held is None else largest.maximum(held)
            return
        if kind == "weightedmean":
            rows = rows * torch.arange(before + 1, before + len(rows) + 1, device=rows.device)[:, None]
        self._sums[req_id] = rows.sum(0) if held is None else held + rows.sum(0)
        self._counts[req_id] = before + len(chunk)


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


def _load_dense(module: DenseModule) -> HeadLinear:
    layer = HeadLinear(module.inputs, module.outputs, module.bias)
    tensors: dict[str, WeightSource]
    if module.tensor is not None:
        tensors = {"weight": gguf_tensor(module.path, module.tensor)}
    else:
        tensors = {source.name.removeprefix("linear."): source for source in SafetensorsFile(module.path).sources()}
    for slot in layer.weight_slots():
        if slot.leaf not in tensors:
            raise ModelError(f"{module.path} lacks linear.{slot.leaf}; fetch the model again")
        slot.check(tensors[slot.leaf])
        slot.load(tensors[slot.leaf])
    return layer
