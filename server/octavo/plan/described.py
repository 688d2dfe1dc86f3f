"""How a quantised checkpoint's weights are held, by what config.json says of its format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.interface.module_names import compile_pattern
from octavo.plan.packed import INT8, Kind, fills_tiles, scaled_nbytes, tiled_nbytes

# Where descriptions list modules that are stored as plain weights.
_PLAIN = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


@dataclass(frozen=True)
class Codes:
    """Of weights in one format. ``kind``: of its codes on a CPU. ``group``: columns with one scale, 0: a row;
    ``scale_bytes``: of such a group on a GPU, with its zero point; ``activations``: those of 8 bits that a GPU
    multiplies them with. A GPU ``keeps`` them as codes, or holds their values."""

    method: str
    kind: Kind
    group: int = 0
    scale_bytes: int = 2
    activations: str | None = None
    keeps: bool = True
    ordered: bool = False  # columns lie in an order of their own, which a GPU holds as well

    def on_gpu(self, rows: Sequence[int], columns: int, size: int, experts: bool) -> int:
        """Bytes of a layer's parts; ``size``: of a number of the model's dtype."""
        values = size * sum(rows) * columns
        group = self.group or columns
        if not self.keeps or (experts and not all(map(fills_tiles, rows))):
            return values
        total = 8 * columns if self.ordered else 0
        for count in rows:
            held = scaled_nbytes(count, columns, group) if self.activations else None
            if held is None:
                held = tiled_nbytes(count, columns, self.kind.bits, group, self.scale_bytes)
            total += size * count * columns if held is None else held
        return total


Description = Callable[[str], Codes | None]


def described_codes(table: dict[str, Any]) -> Description | None:
    """Of config.json's ``quantization_config``: what it says of the module at a path, None: a plain weight. None: a
    format that is not known here."""
    if table.get("quant_method") == "compressed-tensors":
        groups = _groups(table)
        if not groups:
            return None
    else:
        codes = _codes(str(table.get("quant_method", "")), table)
        if codes is None or table.get("dynamic"):  # GPTQModel's exceptions
            return None
        groups = [(None, codes)]
    exact = table.get("quant_method") == "compressed-tensors"
    plain = [pattern for key in _PLAIN for pattern in _patterns(table.get(key), exact)]

    def describe(path: str) -> Codes | None:
        if any(pattern.search(path) for pattern in plain):
            return None
        named = (codes for names, codes in groups if names and any(name.search(path) for name in names))
        return next(named, next((codes for names, codes in groups if names is None), None))

    return describe


def _codes(method: str, table: dict[str, Any]) -> Codes | None:
    group = max(0, _integer(table.get("group_size", table.get("q_group_size")), 0))
    if method in ("awq", "gptq"):
        four = _integer(table.get("bits", table.get("w_bit")), 4) == 4
        if method == "awq":
            zeros = bool(table.get("zero_point", True))
            return Codes(method, Kind(4, affine=zeros), group, 2 + zeros)
        zeros, ordered = not table.get("sym", True), bool(table.get("desc_act", False))
        return Codes(method, Kind(4, affine=True) if four else INT8, group, 2 + zeros, ordered=ordered)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(method, table.get("weight_block_size"))
    if method == "mxfp4":
        return _mxfp4(method)
    if method == "bitsandbytes":
        if table.get("load_in_8bit"):
            return Codes(method, INT8, scale_bytes=4)
        return Codes(method, Kind(4, table=True), 64, keeps=False)
    if method.startswith("modelopt"):
        four = "4" in method or "FP4" in str(table.get("quant_algo", ""))
        return _nvfp4(method) if four else _fp8(method, None)
    return None


def _fp8(method: str, block: Any) -> Codes:
    columns = _integer(block[1], 0) if isinstance(block, list) and len(block) == 2 else 0
    return Codes(method, INT8, columns, 4, "fp8")


def _mxfp4(method: str) -> Codes:
    return Codes(method, Kind(4, table=True), 32, 1)


def _nvfp4(method: str) -> Codes:
    return Codes(method, Kind(4, halves=True, table=True), 16, 4)


def _groups(table: dict[str, Any]) -> list[tuple[list[re.Pattern[str]] | None, Codes]]:
    """compressed-tensors' groups: names of modules, None: all linear ones."""
    found: list[tuple[list[re.Pattern[str]] | None, Codes]] = []
    config_groups = table.get("config_groups")
    for group in config_groups.values() if isinstance(config_groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            targets = group.get("targets")
            linear = not isinstance(targets, list) or "Linear" in targets
            codes = _of_group(weights, str(group.get("format") or table.get("format")))
            found.append((None if linear else _patterns(targets, True), codes))
    return found


def _of_group(weights: dict[str, Any], stored_as: str) -> Codes:
    method, bits = "compressed-tensors", _integer(weights.get("num_bits"), 8)
    group = max(0, _integer(weights.get("group_size"), 0))
    if weights.get("type") == "float":
        if bits == 4:
            return _mxfp4(method) if "mxfp4" in stored_as else _nvfp4(method)
        return _fp8(method, weights.get("block_structure"))
    zeros = not weights.get("symmetric", True)
    if bits == 4:
        return Codes(method, Kind(4, affine=zeros), group, 2 + zeros)
    if stored_as == "pack-quantized" or zeros:
        return Codes(method, INT8, group, 2 + zeros)
    return Codes(method, INT8, group, 2, "int8")


def _patterns(listed: Any, exact: bool) -> list[re.Pattern[str]]:
    names = listed if isinstance(listed, list) else []
    found = []
    for name in names:
        if isinstance(name, str):
            try:
                found.append(compile_pattern(name, "quantization_config", exact))
            except ModelError:
                continue  # whoever loads the weights refuses it
    return found


def _integer(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
