"""A language model's config.json, parsed once: the fields of Llama, which all families have.

A family's class declares the fields that only the family has, overrides defaults (with those of transformers), and
checks in `check` that fields fit together. Fields have transformers' names; `aliases` are a family's own for the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self, dataclass_transform

from octavo.errors import ModelError
from octavo.interface.config_checks import (
    MAX_FACTOR,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    MAX_WINDOW,
    MIN_FACTOR,
    Fields,
    Name,
)
from octavo.interface.model_config import declarations
from octavo.interface.model_config.declarations import Read, declare, flag, integer, number, table, text


def _layer_types(fields: Fields, key: str) -> list[str]:
    value = fields.config[key]
    if not isinstance(value, list) or any(not isinstance(kind, str) for kind in value):
        fields.refuse(key, "must be a list of strings")
    kinds: list[str] = value
    return kinds


def _window(fields: Fields, key: str) -> int | None:
    if fields.config.get("use_sliding_window") is False and fields.config[key] == 0:
        return None  # as transformers 5 writes that there is none
    window: int = fields.integer(key, 1, MAX_WINDOW)
    return window


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A language model's fields, checked. A field without a default is one that config.json must have. Subclasses are
    frozen dataclasses without saying so."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    aliases: ClassVar[Mapping[str, str]] = {}  # the family's own name of a field -> the name here
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that the family does not have, whatever they say
    is_rotary: ClassVar[bool] = True  # whether positions turn queries and keys
    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    text_types: ClassVar[tuple[str, ...]] = ()  # model types of text_config that are built; (): there is but one
    layers_may_differ: ClassVar[bool] = False  # in what per_layer_config says
    overflows_float16: ClassVar[bool] = False  # hidden states beyond what it holds

    architecture: str = ""
    vocab_size: int = integer(1, MAX_VOCAB)
    hidden_size: int = integer(1, MAX_WIDTH)
    num_attention_heads: int = integer(1, MAX_HEADS)
    num_hidden_layers: int = integer(1, MAX_LAYERS)
    intermediate_size: int = integer(1, MAX_WIDTH * 4)
    num_key_value_heads: int | None = integer(1, MAX_HEADS, None)  # None: as many as there are query heads
    head_dim: int | None = integer(2, MAX_HEAD_SIZE, None)  # None: hidden_size / num_attention_heads
    max_position_embeddings: int | None = integer(1, MAX_POSITIONS, None)
    hidden_act: str = text("silu")
    rms_norm_eps: float = number(0.0, 1.0, 1e-6)
    attention_bias: bool = flag(False)
    mlp_bias: bool = flag(False)
    tie_word_embeddings: bool = flag(False)
    eos_token_id: int | list[int] | None = declare(lambda fields, key: fields.token_ids(key), None)
    rope_theta: float = number(1.0, 1e15, 10000.0, above=True)
    rope_local_base_freq: float | None = number(1.0, 1e15, None, above=True)  # rope_theta of layers with a window
    rope_scaling: dict[str, Any] | None = table()
    rope_parameters: dict[str, Any] | None = table()
    original_max_position_embeddings: int | None = integer(1, MAX_POSITIONS, None)
    use_sliding_window: bool = flag(False)
    sliding_window: int | None = declare(_window, None, null=True)
    max_window_layers: int = integer(0, MAX_LAYERS, 28)
    layer_types: list[str] | None = declare(_layer_types, None)
    per_layer_config: dict[str, dict[str, int]] | None = table()  # layer -> what differs there
    quantization_config: dict[str, Any] | None = table()
    dtype: str | None = text(None)

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str, name: Name = str) -> Self:
        """The fields that ``config`` states, the defaults of others. Raises ModelError for the first value that cannot
        be meant: of the wrong type, out of bounds, or at odds with another field.

        ``name``: what ``source`` calls a field (a GGUF header has other names than config.json).
        """
        own = cls.in_common_words(config)
        if cls.text_types and config.get("model_type", cls.text_types[0]) not in cls.text_types:
            raise unsupported_text(config, cls.text_types, source)
        fields = Fields(own, source, name)
        values: dict[str, Any] = {"architecture": own["architectures"][0]}
        for key, read, null_is_none, needed in _declared(cls):  # type: ignore[arg-type]
            if own.get(key) is not None:
                values[key] = read(fields, key)
            elif key in own and null_is_none:
                values[key] = None
            elif needed and key != "intermediate_size":
                read(fields, key)
            elif needed:
                raise fields.error(f"it lacks {name(key)!r}, which {values['architecture']} needs")
        found = cls(**values)
        found.check(fields)
        return found

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """``config`` with the family's own fields under their common names, without those that it does not have."""
        found = {key: value for key, value in config.items() if key not in cls.aliases and key not in cls.ignored}
        for own, common in cls.aliases.items():
            if config.get(own) is not None:
                found[common] = config[own]
        return found

    def check(self, fields: Fields) -> None:
        """Raise ModelError for fields that do not fit together."""
        self.check_heads(fields)
        if self.per_layer_config and not self.layers_may_differ:
            what = f"per_layer_config makes layers differ, which is not supported for {self.architecture}"
            raise fields.error(what)
        if self.quantization_config:
            fields.inner("quantization_config", self.quantization_config).text("quant_method")
        if self.layer_types is not None:
            self._check_layer_types(fields, self.layer_types)
        for key, rope in (("rope_scaling", self.rope_scaling), ("rope_parameters", self.rope_parameters)):
            _check_ropes(fields, key, rope or {})

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one head, in layers of which ``per_layer_config`` says nothing else (Gemma 4)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def deferred_size(self) -> int:
        """Values per token that the first half of the last layer hands to the second, beside attention's output."""
        return self.hidden_size

    @property
    def num_recurrent_layers(self) -> int:
        """Layers that keep a state of a sequence."""
        return 0

    @property
    def num_text_types(self) -> int:
        """Kinds of text that an encoder tells apart in a prompt; 0: none."""
        return 0

    @property
    def expert_count(self) -> int:
        """Experts of each layer that has some; 0: no layer has."""
        return 0

    @property
    def own_fields(self) -> list[dict[str, int]]:
        """The fields in which each layer differs; empty: all layers are alike."""
        return []

    @property
    def inner_size(self) -> int:
        """Width of what an MLP, or the experts of a token together, compute."""
        return self.intermediate_size

    @property
    def num_positions(self) -> int | None:
        """Tokens of the longest text that the model has positions for; None where config.json does not say."""
        return self.max_position_embeddings

    def window(self, layer: int) -> int | None:
        """The sliding window of layer number ``layer``, in tokens; None: it attends to all positions."""
        return self.sliding_window if self.slides(layer) else None

    def slides(self, layer: int) -> bool:
        """True if layer number ``layer`` may have a window."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return self.slides_by_default(layer)

    def slides_by_default(self, layer: int) -> bool:
        """See `slides`: where ``layer_types`` is not there."""
        return False

    def rope(self, layer_type: str | None = None) -> dict[str, Any]:
        """One dictionary of rope_type, rope_theta and whatever the type needs, from either way of saying it.

        ``layer_type`` chooses among those of kinds of layers, where they differ; ModelError where none is asked for.
        """
        stated = self.rope_scaling or self.rope_parameters or {}
        if layer_type is not None and isinstance(stated.get(layer_type), dict):
            stated = stated[layer_type]
        elif layer_type == "sliding_attention" and self.rope_local_base_freq is not None:
            stated = {"rope_theta": self.rope_local_base_freq}  # what stretches the context is for the others
        found = {key: value for key, value in stated.items() if value is not None}
        if any(isinstance(value, dict) for value in found.values()):
            raise ModelError("config.json has rope parameters that differ between layers, which is not supported here")
        found.setdefault("rope_type", found.get("type", "default"))
        found.setdefault("rope_theta", self.rope_theta)
        if self.max_position_embeddings is not None:
            found["max_position_embeddings"] = self.max_position_embeddings
        # Beside the dictionary it wins (as Phi-3 writes it); without any, the model was not trained for less.
        if self.original_max_position_embeddings is not None:
            found["original_max_position_embeddings"] = self.original_max_position_embeddings
        elif self.max_position_embeddings is not None:
            found.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return found

    def check_heads(self, fields: Fields) -> None:
        """Raise ModelError for heads that do not share the hidden state or the keys and values evenly."""
        hidden, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_kv_heads
        name = fields.name("num_attention_heads")
        if heads % kv_heads:
            raise fields.error(f"{fields.name('num_key_value_heads')} ({kv_heads}) must divide {name} ({heads})")
        what = fields.name("head_dim")
        if self.head_dim is None:
            if hidden % heads:
                raise fields.error(f"{name} ({heads}) must divide {fields.name('hidden_size')} ({hidden})")
            what = f"{fields.name('hidden_size')} ({hidden}) / {name} ({heads})"
            if self.head_size > MAX_HEAD_SIZE:
                raise fields.error(f"{what} is a head size of {self.head_size}, more than {MAX_HEAD_SIZE}")
        if self.head_size % 2 and self.is_rotary:
            raise fields.error(f"{what} must be even, as rotary embeddings turn pairs, got {self.head_size}")

    def _check_layer_types(self, fields: Fields, types: list[str]) -> None:
        if any(kind not in self.kinds_of_layers for kind in types):
            fields.refuse("layer_types", f"must be a list of {' and '.join(self.kinds_of_layers)}")
        name, layers = fields.name("layer_types"), self.num_hidden_layers
        if len(types) != layers:
            counted = f"{len(types)} entries for {fields.name('num_hidden_layers')} ({layers})"
            raise fields.error(f"{name} has {counted}")
        for field, none in (("use_sliding_window", False), ("sliding_window", None)):
            if "sliding_attention" in types and field in fields.config and fields.config[field] is none:
                said = f"{fields.name(field)} says that there is no window"
                raise fields.error(f"{name} has sliding_attention, but {said}")


def unsupported_text(config: Mapping[str, Any], built: Iterable[str], source: str) -> ModelError:
    """The error for an architecture around one of several language models, of which those in ``built`` are
    supported."""
    what = f"{config['architectures'][0]} with a text model of type {config['model_type']!r}"
    return ModelError(f"{source}: {what} is not supported; the types that are: {', '.join(built)}")


@cache
def _declared(cls: Any) -> list[tuple[str, Read, bool, bool]]:
    """List each field's name, its reader, whether a null means None, and whether config.json must have it."""
    found = []
    for field in fields(cls):
        if field.name != "architecture":
            at = declarations.declaration(cls, field.name)
            needed = field.default is MISSING and field.default_factory is MISSING
            found.append((field.name, declarations.reader(at), declarations.null_is_none(at), needed))
    return found


def _check_ropes(fields: Fields, key: str, table: dict[str, Any]) -> None:
    """Check one rotary embedding, or one for each kind of layer."""
    typed = "rope_type" in table or "type" in table
    if typed or not any(isinstance(value, dict) for value in table.values()):
        _check_rope(fields.inner(key, table))
    for kind, inner in table.items():
        if isinstance(inner, dict):
            _check_rope(fields.inner(f"{key}.{kind}", inner))


def _check_rope(rope: Fields) -> None:
    """A table of rope_type and whatever the type needs; those that it lacks are named where it is used."""
    for key in ("rope_type", "type"):
        rope.text(key)
    rope.number("rope_theta", 1.0, 1e15, above=True)
    rope.number("factor", MIN_FACTOR, MAX_FACTOR)
    low = rope.number("low_freq_factor", 0.0, MAX_FACTOR, above=True)
    high = rope.number("high_freq_factor", 0.0, MAX_FACTOR, above=True)
    if low is not None and high is not None and high <= low:
        rope.refuse("high_freq_factor", f"must be above {rope.name('low_freq_factor')} ({low:g})")
    rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS, optional=True)
    for key in ("beta_fast", "beta_slow", "attention_factor"):
        rope.number(key, 0.0, MAX_FACTOR, above=True)
    for key in ("mscale", "mscale_all_dim", "llama_4_scaling_beta"):
        rope.number(key, 0.0, MAX_FACTOR)
    rope.flag("truncate")


class PartialRotaryConfig(TextConfig):
    """Fields of families that rotate a part of each head."""

    partial_rotary_factor: float = number(0.0, 1.0, 1.0, above=True)

    def rope(self, layer_type: str | None = None) -> dict[str, Any]:
        """See `TextConfig`."""
        return {"partial_rotary_factor": self.partial_rotary_factor, **super().rope(layer_type)}
