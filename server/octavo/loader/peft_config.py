"""adapter_config.json as PEFT writes it for LoRA: what each of its fields means here.

A field that nobody here knows may change what is computed, so each is in one of three tables: read, without effect on
an answer, or refused by name where it asks for something.
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ModelError

logger = logging.getLogger(__name__)

READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"}
)
_WHERE = "the names of the file's tensors say it"
_INITIAL = "how A and B begin; init_lora_weights says whether it matters"
_TRAINING = "matters while training"
# Why they change no answer.
IGNORED = {
    "target_modules": _WHERE,
    "exclude_modules": _WHERE,
    "layers_to_transform": _WHERE,
    "layers_pattern": _WHERE,
    "ensure_weight_tying": "a tied layer's matrices are saved under its own name, too",
    "lora_dropout": _TRAINING,
    "velora_config": "changes gradients alone",
    "monteclora_config": "draws while training alone",
    "loftq_config": _INITIAL,
    "eva_config": _INITIAL,
    "corda_config": _INITIAL,
    "lora_ga_config": _INITIAL,
    "qalora_group_size": "of use_qalora",
    "megatron_core": "of megatron_config",
    "runtime_config": "how PEFT computes",
    "inference_mode": "whether PEFT goes on training",
    "enable_lora": "of PEFT before 0.3, for fused layers; shapes are checked",
    "merge_weights": "of PEFT before 0.3: when it merges",
    "base_model_name_or_path": "shapes are checked; the same model has many names",
    "revision": "of the base's name",
    "task_type": "which class PEFT wraps",
    "auto_mapping": "which class PEFT wraps",
    "peft_version": "who wrote it",
}
# Meaning of fields that are neither null, false nor empty.
REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA, which pools inputs",
    "use_bdlora": "block-diagonal matrices",
    "lora_bias": "biases of A and B",
    "modules_to_save": "whole modules saved beside the matrices",
    "fan_in_fan_out": "weights stored as [inputs, outputs]",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained rows of an embedding",
    "target_parameters": "matrices for parameters, as those of experts",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow, which routes between adapters",
    "kasa_config": "KaSA, which cuts off a part of the base's weights",
    "megatron_config": "matrices of Megatron's parallel layers",
}
_CHANGES_BASE = "it changes the base's weights when it is loaded"
_CONVERTIBLE = re.compile("(?:pissa|olora|corda|lora_?ga).*")
_BASE_STAYS = ("gaussian", "eva", "orthogonal", "mica")
# A pattern with few repetitions, none of them of a group: matching it takes no time to speak of.
_PATTERN = re.compile(r"(?:[\w.^$|\[\]()-]|\\[.dw]|(?<=[^)*+?])[*+?]){1,200}")
_MAX_REPETITIONS = 3


@dataclass(frozen=True)
class AdapterConfig:
    """Configuration of an adapter: rank and ``alpha``, from which the factor of ``B A`` follows."""

    rank: int
    alpha: float
    is_rank_stabilised: bool = False  # alpha / sqrt(rank)
    ranks: frozenset[int] = frozenset()  # that some modules may have instead
    alphas: dict[str, float] = field(default_factory=dict)  # by a pattern for modules' names

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of a module, by its name in the checkpoint, with matrices of ``rank``."""
        own = (alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return next(own, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def parse_config(text: bytes, path: Path, max_rank: int) -> AdapterConfig:
    """Raises ModelError for what is not a LoRA adapter's, or asks for more than A and B."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type {short(kind)} is not supported; LORA is")
    _check_initial(config.get("init_lora_weights", True), path)
    asked = {name: what for name, what in REFUSED.items() if config.get(name)}
    unknown = [name for name in config if config[name] and not (name in READ or name in IGNORED or name in REFUSED)]
    asked |= {name: "a variant of LoRA" for name in unknown if _is_like_a_variant(name, config[name])}
    if config.get("bias", "none") != "none":
        asked["bias"] = "trained biases"
    for name, what in asked.items():
        raise ModelError(f"{path}: {short(name)} {short(config[name])} is not supported ({what}); train without it")
    if unknown:
        logger.warning("%s: PEFT has no field %s that is known here: ignored", path, ", ".join(map(short, unknown)))
    return _factors(config, path, max_rank)


def _check_initial(value: Any, path: Path) -> None:
    """Raise ModelError for an adapter that belongs to another base than the checkpoint's weights."""
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name in _BASE_STAYS:
        return
    said = f"{path}: init_lora_weights {short(value)} is not supported"
    if _CONVERTIBLE.fullmatch(name):
        raise ModelError(
            f"{said} ({_CHANGES_BASE}); save it by save_pretrained(path_initial_model_for_weight_conversion=...), "
            "which makes it a plain adapter of twice the rank"
        )
    if name == "loftq":
        raise ModelError(
            f"{said} ({_CHANGES_BASE}); serve the base that LoftQ saved, and set init_lora_weights to true here"
        )
    raise ModelError(f"{said}: known are true, false, {', '.join(_BASE_STAYS)}; it may change the base's weights")


def _is_like_a_variant(name: str, value: Any) -> bool:
    return name.startswith("use_") or name.endswith("_config") or isinstance(value, dict)


def _factors(config: dict[str, Any], path: Path, max_rank: int) -> AdapterConfig:
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise ModelError(f"{path}: rank_pattern and alpha_pattern must be objects")
    for rank in (config.get("r"), *ranks.values()):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ModelError(f"{path}: r must be an integer above 0, got {short(rank)}")
        if rank > max_rank:
            raise ModelError(f"{path}: rank {short(rank)} is above max_lora_rank ({max_rank}); raise --max-lora-rank")
    alpha: Any = config.get("lora_alpha")
    for number in (alpha, *alphas.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e9:
            raise ModelError(f"{path}: lora_alpha must be a number, got {short(number)}")
    for pattern in alphas:
        if (
            not _PATTERN.fullmatch(pattern)
            or sum(map(pattern.count, "*+?")) > _MAX_REPETITIONS
            or not _compiles(pattern)
        ):
            raise ModelError(f"{path}: alpha_pattern {short(pattern)} is not a name or a simple pattern")
    return AdapterConfig(
        config["r"],
        float(alpha),
        bool(config.get("use_rslora")),
        frozenset(ranks.values()),
        {pattern: float(number) for pattern, number in alphas.items()},
    )


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def short(value: Any) -> str:
    """``value`` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
