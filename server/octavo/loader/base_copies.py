"""Compare an adapter's copies of base weights: PEFT saves the embedding tables that it has wrapped, by default."""

from __future__ import annotations

import torch

from octavo.errors import ModelError
from octavo.layers.weights import WeightSource
from octavo.loader.checkpoint import HEAD, TABLE, stored_weights
from octavo.models.base import CausalLM

_ROWS = 4096  # that are compared at a time
_FLOATS = ("F32", "F16", "BF16", "F64")
# Types to which a base may have been rounded by the training that saved it.
_ROUNDINGS = (torch.float64, torch.bfloat16, torch.float16)


def check_copies(copies: dict[str, WeightSource], model: CausalLM, path: str) -> None:
    """Raise ModelError unless ``copies``, by the module's name in the checkpoint, are of tables of tokens and equal the
    base's own, as it is stored or as it was rounded for training."""
    if not copies:
        return
    base = {model.weight_name(name): source for name, source in stored_weights(model.config)}
    for module, copy in copies.items():
        name = model.weight_name(f"{module}.weight")
        if name not in (TABLE, HEAD) or copy.qtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {copy.name[:200]!r} is not a matrix of LoRA (DoRA, biases and whole modules are not "
                "supported)"
            )
        own = base.get(name) or base.get(TABLE)  # a tied model stores one
        what = f"{path}: tensor {copy.name!r} is a copy of the base's table of tokens"
        way_out = "save the adapter with save_embedding_layers=False"
        if own is None or own.qtype not in _FLOATS:
            stored = "not there" if own is None else f"stored as {own.qtype}"
            raise ModelError(
                f"{what}, and cannot be compared with {model.config.model}'s, which is {stored}; {way_out}"
            )
        if own.shape != copy.shape:
            raise ModelError(
                f"{what} of shape {list(copy.shape)}, {model.config.model} has {list(own.shape)}: its vocabulary was "
                "resized; merge the adapter into the model"
            )
        if not _is_equal(own, copy):
            raise ModelError(
                f"{what} with other values than {model.config.model} has; is the adapter another model's? If the table "
                f"was trained, merge the adapter into the model, else {way_out}"
            )


def _is_equal(own: WeightSource, copy: WeightSource) -> bool:
    roundings = list(_ROUNDINGS)
    for first in range(0, own.shape[0], _ROWS):
        rows = slice(first, min(first + _ROWS, own.shape[0]))
        ours, theirs = own[rows].load(), copy[rows].load()
        roundings = [one for one in roundings if torch.equal(ours.to(one).to(theirs.dtype), theirs)]
        if not roundings:
            return False
    return True
