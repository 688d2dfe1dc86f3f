"""Find the modules of a quantised checkpoint that are stored as plain weights.

A checkpoint lists their names (``modules_to_not_convert``, ``ignore``, ``exclude_modules``), by rules that differ from
tool to tool, and lists are often incomplete (the head, say). The tensors themselves leave no doubt, so they decide, and
the lists are checked against them.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.interface.module_names import compile_pattern
from octavo.layers.quantization.weight_format import FLOATS, StoredModule, WeightFormat


class SkippedModules:
    """Patterns of module names, as the checkpoint calls them: a name as a whole or in part (at dots), one with ``*``,
    or a regular expression after ``re:``. ``field`` is where they were found."""

    def __init__(self, patterns: Sequence[str], field: str, exact: bool = False) -> None:
        self.field = field
        self._patterns = [compile_pattern(pattern, field, exact) for pattern in patterns]

    @classmethod
    def from_fields(cls, fields: Fields, key: str, exact: bool = False) -> SkippedModules:
        """Read the list of skipped modules in a description; ``exact``: none is a part of a name. Raises ModelError if
        it is no list of strings."""
        listed = fields.config.get(key)
        if listed is None:
            listed = []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            fields.refuse(key, "must be a list of module names")
        return cls(listed, fields.name(key), exact)

    def __contains__(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._patterns)

    def choose(self, module: StoredModule, codes: str, quantized: WeightFormat) -> WeightFormat | None:
        """Return ``quantized`` if the module has a tensor ``codes``; None for a plain or a tied weight.

        Raises ModelError where it is listed as plain and has ``codes``.
        """
        if codes in module.tensors:
            if module.name in self and not is_plain(module):
                raise ModelError(
                    f"tensor {module.tensors[codes].name!r} is quantised, but {self.field} lists {module.name!r} as "
                    "not quantised; the weights and their quantization_config are not of one model"
                )
            return quantized
        return None if is_plain(module) or module.name in self or not module.tensors else quantized


def is_plain(module: StoredModule) -> bool:
    """True if the module has a weight of floating-point numbers."""
    weight = module.tensors.get("weight")
    return weight is not None and weight.qtype in FLOATS
