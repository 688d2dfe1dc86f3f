"""Packing of codes with a scale for each group of columns into the layout of GPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.group_weight import FORMS, GroupWeight, arrange_codes, block_columns, group_problem

_CHANNELS = 4096  # arranged at a time: bounds the copies


def pack_group_weight(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
    *,
    form: str,
    group: int,
    device: torch.device | str = "cpu",
) -> GroupWeight:
    """Pack ``codes`` uint8 [N, K], one an element, and ``scales`` [N, G] for a GPU; the result lies on ``device``.

    ``zeros`` uint8 [N, G], None: 2^(bits - 1) for integers, and never for the floating-point forms; ``order`` int [K];
    ``form`` as in `GroupWeight`. Raises ValueError for a form or group size without a kernel and for shapes that do not
    fit.
    """
    channels, width = codes.shape
    if form not in FORMS:
        raise ValueError(f"form: {form!r} is not known; choose one of {', '.join(FORMS)}")
    problem = group_problem(form, width, group)
    if problem:
        raise ValueError(problem)
    if group >= width:
        group = -(-width // block_columns(form)) * block_columns(form)
    expected = (channels, -(-width // group))
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: shape {list(tensor.shape)}, codes and group ask for {list(expected)}")
    if zeros is not None and not form.startswith("int"):
        raise ValueError(f"zeros: the form {form!r} has none")
    arranged = [arrange_codes(part.to(device), form) for part in codes.split(_CHANNELS)]
    return GroupWeight(
        arranged[0] if len(arranged) == 1 else torch.cat(arranged),
        scales.t().contiguous().to(device),
        None if zeros is None else zeros.t().contiguous().to(device),
        None if order is None else order.to(device, torch.int64),
        form,
        channels,
        width,
        group,
    )
