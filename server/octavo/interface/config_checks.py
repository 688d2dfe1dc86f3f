"""Checks of config.json and GGUF metadata: every number that sizes, loops or divides is checked before it is used.

A file comes from anywhere, and one number in it can ask for all memory, or for memory that is not there. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.errors import ModelError
from octavo.interface.architectures import (
    ENCODERS,
    LAYER_TYPES,
    LLAVA_TEXTS,
    MODELS,
    NONE_BY_NULL,
    WHOLE_ROTARY,
    WITHOUT_ROTARY,
    in_common_words,
)

# Well above what any model has, and low enough for what is computed from them.
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20  # of hidden states and of what lies between two layers of an MLP
MAX_LAYERS = 1024
MAX_EXPERTS = 4096  # of a layer
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1024
MAX_POSITIONS = 1 << 27
MAX_STREAMS = 16  # of hidden states (AltUp)
MAX_WINDOW = (1 << 31) - 1  # kernels count positions in 32 bits
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6  # of a rope scaling

# Fields that mean nothing in these families, whatever they say: transformers does not read them either.
_IGNORED = {
    "OPTForCausalLM": ("head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta"),
    "GPT2LMHeadModel": ("head_dim", "num_key_value_heads"),
    "GPTNeoXForCausalLM": ("head_dim", "num_key_value_heads"),
    "FalconForCausalLM": ("head_dim",),
    **{name: ("num_experts",) for name in ENCODERS if name.startswith("NomicBert")},  # moe_every_n_layers decides
    **dict.fromkeys(WHOLE_ROTARY, ("partial_rotary_factor",)),
}

_FLAGS = (
    "attention_out_bias",
    "attention_bias", "mlp_bias", "use_sliding_window", "bias", "qkv_bias", "use_bias", "use_qk_norm", "alibi",
    "use_parallel_residual", "new_decoder_architecture", "multi_query", "parallel_attn", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "norm_bias", "classifier_bias", "qk_layernorm",
)  # fmt: skip

Name = Callable[[str], str]


# Architectures around one of several language models, by model_type of text_config: those that are built.
_TEXT_TYPES = {
    "Mistral3ForConditionalGeneration": ("mistral", "mistral3", "ministral3"),
    **{name: tuple(LLAVA_TEXTS) for name in MODELS if name.startswith("Llava")},
    "Idefics3ForConditionalGeneration": ("llama",),
    "SmolVLMForConditionalGeneration": ("llama",),
}


def check_config(config: dict[str, Any], source: str, name: Name = str) -> dict[str, Any]:
    """The configuration without fields that its family does not have, and without nulls. Raises ModelError for the
    first value that cannot be meant: of the wrong type, out of bounds, or at odds with another field.

    ``name``: what ``source`` calls a field (a GGUF header has other names than config.json).
    """
    architecture = config["architectures"][0]
    ignored = _IGNORED.get(architecture, ())
    # A null is as good as nothing, but for fields that have a default: there it means none.
    given = {key: value for key, value in config.items() if value is not None or key in NONE_BY_NULL}
    config = {key: value for key, value in in_common_words(given).items() if key not in ignored}
    fields = Fields(config, source, name)
    text_types = _TEXT_TYPES.get(architecture, ())
    if text_types and config.get("model_type", text_types[0]) not in text_types:  # text_config's, if that has one
        raise ModelError(
            f"{source}: {architecture} with a text model of type {config['model_type']!r} is not supported; the types "
            f"that are: {', '.join(text_types)}"
        )
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    fields.integer("vocab_size", 1, MAX_VOCAB)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    fields.integer("max_position_embeddings", 1, MAX_POSITIONS, optional=architecture not in WITHOUT_ROTARY)
    fields.token_ids("eos_token_id")
    fields.flag("tie_word_embeddings")
    fields.number("rms_norm_eps", 0.0, 1.0)
    if config.get("per_layer_config") and not architecture.startswith("Gemma4"):
        raise fields.error(f"per_layer_config makes layers differ, which is not supported for {architecture}")
    if quantization := fields.table("quantization_config"):
        fields.inner("quantization_config", quantization).text("quant_method")
    _check_heads(fields, hidden, heads)
    if architecture == "OPTForCausalLM":
        _check_opt(fields)
    else:
        _check_llama(fields, layers)
        if architecture.startswith("Gemma"):
            _check_gemma(fields, layers)
            if architecture.startswith("Gemma3n"):
                _check_gemma_3n(fields, layers)
            elif architecture.startswith("Gemma4"):
                _check_gemma_4(fields, layers, hidden, heads)
        elif architecture.startswith("Deepseek"):
            _check_deepseek(fields, architecture)
        elif architecture == "GptOssForCausalLM":
            _check_gpt_oss(fields)
        elif architecture == "GraniteMoeHybridForCausalLM":
            _check_granite_4(fields)
        elif architecture in ENCODERS:
            _check_encoder(fields)
    return config


def _check_heads(fields: Fields, hidden: int, heads: int) -> None:
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, optional=True) or heads
    if heads % kv_heads:
        kv_name, name = fields.name("num_key_value_heads"), fields.name("num_attention_heads")
        raise fields.error(f"{kv_name} ({kv_heads}) must divide {name} ({heads})")
    size = fields.integer("head_dim", 2, MAX_HEAD_SIZE, optional=True)
    if size is None:
        if hidden % heads:
            raise fields.error(
                f"{fields.name('num_attention_heads')} ({heads}) must divide {fields.name('hidden_size')} ({hidden})"
            )
        size = hidden // heads
        what = f"{fields.name('hidden_size')} ({hidden}) / {fields.name('num_attention_heads')} ({heads})"
        if size > MAX_HEAD_SIZE:
            raise fields.error(f"{what} is a head size of {size}, more than {MAX_HEAD_SIZE}")
    else:
        what = fields.name("head_dim")
    if size % 2 and fields.config["architectures"][0] not in WITHOUT_ROTARY:
        raise fields.error(f"{what} must be even, as rotary embeddings turn pairs, got {size}")


def _check_llama(fields: Fields, layers: int) -> None:
    if "intermediate_size" not in fields.config:
        raise fields.error(f"it lacks 'intermediate_size', which {fields.config['architectures'][0]} needs")
    widths = fields.config["intermediate_size"]
    if isinstance(widths, list) and len(widths) == layers and all(width == widths[0] for width in widths):
        fields.config["intermediate_size"] = widths[0]  # as Gemma 3n states it, one for each layer
    fields.integer("intermediate_size", 1, MAX_WIDTH * 4)
    fields.number("layer_norm_eps", 0.0, 1.0)
    fields.number("logit_scale", 0.0, MAX_FACTOR, above=True)
    fields.number("rope_theta", 1.0, 1e15, above=True)
    fields.text("hidden_act")
    if fields.config.get("use_sliding_window") is False and fields.config.get("sliding_window") == 0:
        del fields.config["sliding_window"]  # as transformers 5 writes that there is none
    fields.integer("sliding_window", 1, MAX_WINDOW, optional=True)
    fields.integer("max_window_layers", 0, MAX_LAYERS, optional=True)
    for key in _FLAGS:
        fields.flag(key)
    for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        fields.number(key, 0.0, MAX_FACTOR, above=True)
    fields.number("partial_rotary_factor", 0.0, 1.0, above=True)
    _check_layer_lists(fields, layers)
    if fields.config.get("num_experts") is not None:
        _check_experts(fields)
    else:
        fields.integer("shared_intermediate_size", 1, MAX_WIDTH * 4, optional=True)
    fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, optional=True)
    for key in ("rope_scaling", "rope_parameters"):
        table = fields.table(key)
        if not table:
            continue
        typed = "rope_type" in table or "type" in table
        if typed or not any(isinstance(value, dict) for value in table.values()):  # else one a kind of layer
            _check_rope(fields.inner(key, table))
        for kind, inner in table.items():
            if isinstance(inner, dict):
                _check_rope(fields.inner(f"{key}.{kind}", inner))


def _check_layer_lists(fields: Fields, layers: int) -> None:
    """Lists with an entry for each layer."""
    types = fields.config.get("layer_types")
    if types is not None:
        known = LAYER_TYPES.get(fields.config["architectures"][0], ("full_attention", "sliding_attention"))
        if not isinstance(types, list) or any(kind not in known for kind in types):
            fields.refuse("layer_types", f"must be a list of {' and '.join(known)}")
        if len(types) != layers:
            length = f"{len(types)} entries for {fields.name('num_hidden_layers')} ({layers})"
            raise fields.error(f"{fields.name('layer_types')} has {length}")
        _check_windows(fields, types)
    turns = fields.config.get("no_rope_layers")
    if turns not in (None, []) and (
        not isinstance(turns, list) or len(turns) < layers or any(type(turn) is not int for turn in turns)
    ):
        fields.refuse("no_rope_layers", f"must be a list of 0 or 1 for each of {layers} layers")
    if types is None or fields.config["architectures"][0] != "Exaone4ForCausalLM":  # which has 0 or letters beside
        fields.integer("sliding_window_pattern", 1, MAX_LAYERS, optional=True)
    fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, optional=True)


def _check_windows(fields: Fields, types: list[str]) -> None:
    """Raise ModelError for layers that are said to have a window where other fields say that there is none."""
    if "sliding_attention" not in types:
        return
    for field, none in (("use_sliding_window", False), ("sliding_window", None)):
        if field in fields.config and fields.config[field] is none:
            said = f"{fields.name(field)} says that there is no window"
            raise fields.error(f"{fields.name('layer_types')} has sliding_attention, but {said}")


def _check_experts(fields: Fields) -> None:
    """Of a mixture of experts."""
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    chosen = fields.integer("num_experts_per_tok", 1, MAX_EXPERTS)
    if chosen > count:
        limit = f"{fields.name('num_experts')} ({count})"
        raise fields.error(f"{fields.name('num_experts_per_tok')} ({chosen}) must be at most {limit}")
    positive = ("moe_intermediate_size", "decoder_sparse_step", "n_group", "topk_group", "interleave_moe_layer_step")
    for key in (*positive, "intermediate_size_mlp", "attention_chunk_size", "floor_scale"):
        fields.integer(key, 1, MAX_WIDTH * 4, optional=True)
    for key in (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
    ):
        fields.integer(key, 0, MAX_WIDTH * 4, optional=True)
    groups, kept = (fields.config.get(key) or 1 for key in ("n_group", "topk_group"))
    if count % groups or kept > groups or chosen > count // groups * kept:
        raise fields.error(f"{chosen} of {count} experts cannot be chosen from {kept} of n_group ({groups}) groups")
    fields.number("routed_scaling_factor", 0.0, MAX_FACTOR, above=True)
    fields.number("attn_scale", 0.0, MAX_FACTOR)
    fields.flag("attn_temperature_tuning")
    for key in ("mlp_only_layers", "moe_layers"):
        layers = fields.config.get(key)
        if not isinstance(layers, (list, type(None))) or any(type(layer) is not int for layer in layers or []):
            fields.refuse(key, "must be a list of numbers of layers")
    fields.flag("norm_topk_prob")


def _check_gpt_oss(fields: Fields) -> None:
    fields.number("swiglu_limit", 0.0, MAX_FACTOR, above=True)
    if fields.config.get("swiglu_alpha", 1.702) != 1.702:
        fields.refuse("swiglu_alpha", "must be 1.702, what gpt-oss' activation has")


def _check_granite_4(fields: Fields) -> None:
    fields.integer("num_local_experts", 0, MAX_EXPERTS, optional=True)
    if fields.config.get("position_embedding_type") not in (None, "rope", "nope"):
        fields.refuse("position_embedding_type", 'must be "rope", "nope" or null')


def _check_deepseek(fields: Fields, architecture: str) -> None:
    """Sizes of latent attention, and how experts are chosen."""
    for key in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        fields.integer(key, 1, MAX_WIDTH)
    fields.integer("q_lora_rank", 1, MAX_WIDTH, optional=True)
    fields.flag("rope_interleave")
    third = architecture == "DeepseekV3ForCausalLM"
    asked = {"scoring_func": "sigmoid" if third else "softmax", "moe_layer_freq": 1}
    asked |= {"topk_method": "noaux_tc"} if third else {"norm_topk_prob": False}
    for key, value in asked.items():
        if fields.config.get(key, value) != value:
            fields.refuse(key, f"must be {value!r}, as {architecture} models have it")
    method = fields.config.get("topk_method", "greedy")
    if not third and method not in ("greedy", "group_limited_greedy"):
        fields.refuse("topk_method", "must be 'greedy' or 'group_limited_greedy'")
    if third or method == "group_limited_greedy":
        for key in ("n_group", "topk_group"):
            fields.integer(key, 1, MAX_EXPERTS)


def _check_gemma(fields: Fields, layers: int) -> None:
    """Also fills in which layers have a window, where only a pattern is said."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.number(key, 0.0, MAX_FACTOR, above=True)
    fields.number("query_pre_attn_scalar", 0.0, MAX_WIDTH, above=True)
    fields.number("rope_local_base_freq", 1.0, 1e15, above=True)
    fields.text("hidden_activation")
    if fields.config.get("use_bidirectional_attention") not in (None, False, "vision"):  # that of images
        raise fields.error("use_bidirectional_attention is for encoders, which are not supported here")
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, optional=True)
    if pattern is not None:
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
        fields.config.setdefault("layer_types", kinds)
        if "sliding_attention" in fields.config["layer_types"]:
            fields.integer("sliding_window", 1, MAX_WINDOW)


def _check_shared_layers(fields: Fields, layers: int) -> None:
    """Of Gemma 3n and 4: layers that share others' keys and values, and embeddings of each layer."""
    fields.integer("vocab_size_per_layer_input", 1, MAX_VOCAB)
    shared, types = fields.integer("num_kv_shared_layers", 0, layers - 1), fields.config["layer_types"]
    if without := set(types) - set(types[: layers - shared]):
        name = fields.name("num_kv_shared_layers")
        raise fields.error(f"{name} ({shared}) leaves no layer of type {without.pop()} with keys and values")


def _check_gemma_3n(fields: Fields, layers: int) -> None:
    """Also fills in which gates are sparse, where nothing is said."""
    _check_shared_layers(fields, layers)
    for key in ("hidden_size_per_layer_input", "laurel_rank"):
        fields.integer(key, 1, MAX_WIDTH)
    streams = fields.integer("altup_num_inputs", 2, MAX_STREAMS)
    fields.integer("altup_active_idx", 0, streams - 1)
    fields.flag("altup_correct_scale")
    sparse = [0.95 if layers > 10 and layer < 10 else 0.0 for layer in range(layers)]
    found = fields.config.setdefault("activation_sparsity_pattern", sparse)
    numbers = found if isinstance(found, list) and len(found) == layers else [None]
    if not all(isinstance(part, (int, float)) and type(part) is not bool and 0 <= part < 1 for part in numbers):
        fields.refuse("activation_sparsity_pattern", f"must be a number from 0 to below 1 for each of {layers} layers")


def _check_gemma_4(fields: Fields, layers: int, hidden: int, heads: int) -> None:
    """Also brings what differs between layers into ``per_layer_config``, layer (a string) -> fields."""
    for key in ("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"):
        fields.flag(key)
    fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, optional=True)
    # As transformers has it, whatever the last entry says.
    types = fields.config["layer_types"] = [*fields.config["layer_types"][:-1], "full_attention"]
    _check_shared_layers(fields, layers)
    stated = fields.table("per_layer_config")
    if stated is None:
        full = {"head_dim": fields.integer("global_head_dim", 2, MAX_HEAD_SIZE)}
        kv_heads = fields.integer("num_global_key_value_heads", 1, MAX_HEADS, optional=True)
        if kv_heads and fields.config.get("attention_k_eq_v"):
            full["num_key_value_heads"] = kv_heads
        stated = {str(layer): full for layer, kind in enumerate(types) if kind == "full_attention"}
    by_kind: dict[str, Any] = {}
    for layer, kind in enumerate(types):
        own = stated.get(str(layer), {})
        if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
            fields.refuse("per_layer_config", "must say head_dim and num_key_value_heads of layers, nothing else")
        if by_kind.setdefault(kind, own) != own:
            fields.refuse("per_layer_config", "must say the same of all layers of one type")
        _check_heads(fields.inner(f"per_layer_config.{layer}", {**fields.config, **own}), hidden, heads)
    fields.config["per_layer_config"] = stated


def _check_encoder(fields: Fields) -> None:
    fields.integer("type_vocab_size", 0, MAX_VOCAB, optional=True)
    fields.integer("pad_token_id", 0, MAX_VOCAB, optional=True)
    for key in ("local_attention", "global_attn_every_n_layers"):
        fields.integer(key, 1, MAX_WINDOW, optional=True)
    fields.number("rope_local_base_freq", 1.0, 1e15, above=True)
    if fields.config.get("is_decoder"):
        raise fields.error("is_decoder makes an encoder a decoder, which is not supported")
    positions = "rope" if MODELS[fields.config["architectures"][0]] == "gte" else "absolute"
    if fields.config.get("position_embedding_type", positions) != positions:
        fields.refuse("position_embedding_type", f'must be "{positions}"')


def num_positions(config: dict[str, Any]) -> int | None:
    """Tokens of the longest text that a model has positions for; None where its config does not say."""
    positions: int | None = config.get("max_position_embeddings")
    if positions is not None and "Roberta" in config["architectures"][0]:  # counted from behind the padding token's
        return max(1, positions - int(config.get("pad_token_id", 1)) - 1)
    return positions


def query_growth(config: dict[str, Any]) -> tuple[int, float] | None:
    """Of Ministral 3, whose queries are multiplied by 1 + beta log(1 + floor(position / length)): (length, beta)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    length, beta = rope.get("original_max_position_embeddings"), rope.get("llama_4_scaling_beta")
    return (length, beta) if length and beta else None


def _inner_name(name: Name, outer: str, inner: str) -> str:
    return name(f"{outer}.{inner}")


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


def _check_opt(fields: Fields) -> None:
    if "ffn_dim" not in fields.config:
        raise fields.error("it lacks 'ffn_dim', which OPTForCausalLM needs")
    fields.integer("ffn_dim", 1, MAX_WIDTH * 4)
    fields.integer("word_embed_proj_dim", 1, MAX_WIDTH, optional=True)
    fields.text("activation_function")
    for key in ("enable_bias", "layer_norm_elementwise_affine", "do_layer_norm_before", "_remove_final_layer_norm"):
        fields.flag(key)


class Fields:
    """Checked values of one table. Raises ModelError, which names the field as ``name`` does."""

    def __init__(self, config: dict[str, Any], source: str, name: Name) -> None:
        self.config, self.source, self.name = config, source, name

    def inner(self, key: str, table: dict[str, Any]) -> Fields:
        """Of ``table``, an object within this one."""
        return Fields(table, self.source, partial(_inner_name, self.name, key))

    def integer(self, key: str, low: int, high: int, optional: bool = False) -> Any:
        """The integer, from ``low`` to ``high``; None where it is optional and not set."""
        value = self.config.get(key)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            kind = "a positive integer up to" if low == 1 else f"an integer from {low} to"
            self.refuse(key, f"must be {kind} {high}")
        return value

    def number(self, key: str, low: float, high: float, above: bool = False) -> Any:
        """The finite number from ``low`` (not itself, if ``above``) to ``high``; None where it is not set."""
        value = self.config.get(key)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not fits or not math.isfinite(value) or (above and value == low):
            limits = f"above {low:g} and up to" if above else f"from {low:g} to"
            self.refuse(key, f"must be a number {limits} {high:g}")
        return value

    def flag(self, key: str) -> None:
        """Check for a bool, where the field is set."""
        if not isinstance(self.config.get(key), (bool, type(None))):
            self.refuse(key, "must be true or false")

    def text(self, key: str) -> None:
        """Check for a string, where the field is set."""
        if not isinstance(self.config.get(key), (str, type(None))):
            self.refuse(key, "must be a string")

    def table(self, key: str) -> dict[str, Any] | None:
        """The object, or None where it is not set."""
        value = self.config.get(key)
        if not isinstance(value, (dict, type(None))):
            self.refuse(key, "must be an object")
        return value

    def token_ids(self, key: str) -> None:
        """Check for a token id or a list of them, where the field is set."""
        value = self.config.get(key)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < MAX_VOCAB:
                self.refuse(key, f"must be a token id, or a list of them, from 0 to {MAX_VOCAB - 1}")

    def refuse(self, key: str, demand: str) -> None:
        """Raise ModelError: the field must be ``demand``."""
        shown = shown_value(self.config.get(key))
        raise self.error(f"{self.name(key)} {demand}, got {shown}")

    def error(self, text: str) -> ModelError:
        """A ModelError of this source, to be raised."""
        return ModelError(f"{self.source}: {text}; correct the file or fetch the model again")


def shown_value(value: Any) -> str:
    """A value as an error message shows it: one short line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
