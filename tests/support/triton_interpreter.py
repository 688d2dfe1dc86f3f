"""Triton's interpreter, made as strict and as exact as tests need it.

A GPU starts programs in any order, gives scratch memory with whatever lay there, rounds bfloat16 and adds the products
of a tile in one order. The interpreter runs programs in the order of the grid, holds bfloat16 as integers, cuts where
it should round, and adds as numpy does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# Types that the interpreter holds as integers, and torch's for them.
_STORED = {"bf16": (torch.bfloat16, torch.int16, np.uint16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8)}


def repair() -> None:
    """Rounding to bfloat16 and e4m3, their products, and sums of products that do not depend on a tile's height."""
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _rounding(getattr(InterpreterBuilder, name)))
    # Names that are bound to the function, not looked up.
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(InterpreterBuilder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)


def hasten() -> None:
    """Leave out what the interpreter computes and drops, nearly half of its time: whether integers overflow, which is
    told with ``debug`` alone, and to prepare `triton.language` again at each call of a function within a kernel."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    if interpreter._patch_lang is not _prepare:
        _prepare.plain, interpreter._patch_lang = interpreter._patch_lang, _prepare


class _Prepare:
    """Takes the place of the interpreter's `_patch_lang`: of a kernel, whose end undoes it, and of what it calls."""

    def __init__(self) -> None:
        self.plain: Callable[..., Any] = interpreter._patch_lang
        self.scope: Any = None
        self.done: set[int] = set()  # modules that are prepared

    def __call__(self, function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if self.scope is None:
            scope, self.done = self.plain(function), modules
            self.scope, undo = scope, scope.restore

            def restore() -> None:
                self.scope = None
                undo()

            scope.restore = restore
            return scope
        if not modules <= self.done:
            self.scope._changes += self.plain(function)._changes
            self.done |= modules
        return interpreter._LangPatchScope()


_prepare = _Prepare()


def _rounding(plain: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast(self: Any, src: TensorHandle, dst_type: Any, *mode: Any) -> TensorHandle:
        stored = _STORED.get(dst_type.scalar.name)
        if stored is None or src.dtype.scalar not in (tl.float32, tl.float16):
            return plain(self, src, dst_type, *mode)
        dtype, view, numpy = stored
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(dtype).view(view).numpy()
        return TensorHandle(rounded.view(numpy).reshape(src.data.shape), dst_type.scalar)

    return cast


def _dot(plain: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        names = {a.dtype.scalar.name, b.dtype.scalar.name}
        if a.dtype.scalar == tl.int8:
            product = np.matmul(a.data.astype(np.int64), b.data.astype(np.int64)).astype(np.int32)
        elif names & _STORED.keys() or (names == {"fp32"} and d.data.dtype == np.float32):
            product = np.matmul(_floats(a), _floats(b), dtype=np.float64).astype(np.float32)
        else:
            return plain(self, a, b, d, *precision)
        return TensorHandle(product + d.data, d.dtype.scalar)

    return dot


def _floats(handle: TensorHandle) -> np.ndarray:
    stored = _STORED.get(handle.dtype.scalar.name)
    if stored is None:
        return handle.data
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16 if stored[2] == np.uint16 else np.uint8))
    return bits.view(stored[0]).float().numpy()


@contextmanager
def hostile_gpu(seed: int) -> Iterator[None]:
    """Programs run in a random order, and memory that is asked for holds NaN and the largest integers."""
    rng = random.Random(seed)
    dim, idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    order: list[tuple[int, int, int]] = []

    def set_grid_dim(self: Any, nx: int, ny: int, nz: int) -> None:
        dim(self, nx, ny, nz)
        order[:] = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
        rng.shuffle(order)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        idx(self, *order.pop())

    before = torch.are_deterministic_algorithms_enabled()
    InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = set_grid_dim, set_grid_idx
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = dim, idx
        torch.use_deterministic_algorithms(before)
