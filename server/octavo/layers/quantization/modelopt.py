"""NVIDIA's ModelOpt: FP8 and NVFP4 (hf_quant_config.json, or the same in config.json)."""

from __future__ import annotations

from octavo.interface.config_checks import Fields
from octavo.layers.quantization.fp4 import NVFP4Weight
from octavo.layers.quantization.fp8 import FP8Weight
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import CheckpointFormat, StoredModule, WeightFormat

_WEIGHTS: dict[str, WeightFormat] = {
    "FP8": FP8Weight(),
    "FP8_PER_CHANNEL_PER_TOKEN": FP8Weight(),
    "NVFP4": NVFP4Weight("weight", "weight_scale_2", reciprocal=False),
}


class ModelOpt(CheckpointFormat):
    """A checkpoint of ModelOpt's export."""

    def __init__(self, fields: Fields) -> None:
        algorithm = str(fields.config.get("quant_algo", "")).upper()
        if algorithm not in _WEIGHTS:
            fields.refuse("quant_algo", f"must be one of {', '.join(_WEIGHTS)}")
        self.name = "modelopt_fp4" if algorithm == "NVFP4" else "modelopt"
        self._format = _WEIGHTS[algorithm]
        key = "ignore" if fields.config.get("ignore") is not None else "exclude_modules"
        self._skipped = SkippedModules.from_fields(fields, key)

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        return self._skipped.choose(module, "weight_scale", self._format)
