"""The tensors of a quantized checkpoint that is not here, as its config.json describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from octavo.interface.engine_config import ModelConfig
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.registry import stored_format
from octavo.layers.quantization.weight_format import CheckpointFormat, StoredModule
from octavo.layers.weights import WeightSource
from octavo.loader.load_model import build_model, weight_slots

# Modules that tools leave plain, whether descriptions list them or not.
_NEVER_CODES = re.compile(r"(?:^|\.)(?:lm_head|gate|shared_expert_gate|\w*embed\w*)$")
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass
class Header:
    """A `WeightSource` that says what a tensor is and has no numbers."""

    name: str
    shape: tuple[int, ...]
    qtype: str

    def load(self, dtype: torch.dtype | None = None) -> NoReturn:
        """Raises AssertionError, as all that reads numbers does."""
        raise AssertionError(f"{self.name} is not here")

    def load_into(self, target: torch.Tensor) -> None:
        """See `load`."""
        self.load()

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `load`."""
        self.load()

    def __getitem__(self, index: int | slice) -> WeightSource:
        """See `load`."""
        self.load()


def described_weights(config: ModelConfig) -> list[tuple[str, WeightSource]]:
    """List the weights that config.json's quantisation describes, by the model's own names; none without a description.
    The first expert stands for all. Modules that tools leave plain are plain, listed or not. Raises ModelError."""
    described = stored_format(config)
    if described is None:
        return []
    hf: dict[str, Any] = {key: value for key, value in config.hf_config.items() if key != "quantization_config"}
    plain = replace(config, hf_config=hf, quantization=None)
    model = build_model(plain, "cuda", TensorParallel(), [], without_memory=True, measured=True)
    said = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found: list[WeightSource] = []
    for name, (slot, *_) in weight_slots(model).items():
        if slot.shape is not None:
            found += _stored_as(name, slot.shape, described, _NAMES.get(said, "F32"))
    return [(header.name, header) for header in found]


def _stored_as(name: str, shape: tuple[int, ...], described: CheckpointFormat, plain: str) -> Iterator[Header]:
    """The tensors of a weight: one of type ``plain``, or those of its format."""
    module, _, leaf = name.rpartition(".")
    format_ = None
    if leaf == "weight" and len(shape) == 2 and not _NEVER_CODES.search(module):
        format_ = described.weight_format(StoredModule(module, {leaf: Header(name, shape, "codes")}))
    if format_ is None:
        yield Header(name, shape, plain)
        return
    for one in format_.leaves(shape[0], shape[1]):
        if not one.optional:
            yield Header(f"{module}.{one.name}", (one.shapes or ((1,),))[0], (one.qtypes or ("U8",))[0])
