"""The weights of a decoder as sizes, from config.json alone and without torch.

What the families' modules build (`octavo.models`), in numbers. A test holds every family that is described here to the
model built without memory; a family that is not is measured by building that (`octavo.plan.measure`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.interface.config_checks import query_growth
from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.ranks import deal, divide

# "sliding_attention" layers may have a rotary table of their own.
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Linear:
    """A linear layer, or ``count`` of them: ``rows`` of each part that is merged in it, on one rank. ``paths``: the
    parts' modules, by the engine's names; those of experts without their number."""

    rows: tuple[int, ...]
    columns: int
    paths: tuple[str, ...]
    bias: bool = False
    kind: str = "linear"  # linear | exact | expert | head | latent: taken apart once it is loaded
    count: int = 1


@dataclass
class Shapes:
    """Of one rank."""

    vocab: int
    embedding: int  # width of the table of tokens
    tied: bool
    linears: list[Linear] = field(default_factory=list)
    plain: int = 0  # numbers in the model's dtype: norms, learned positions
    floats: int = 0  # numbers in float32
    tables: int = 0  # of them, what follows from the configuration: no parameters
    specs: list[KVCacheSpec] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """What differs from Llama. Functions are given config.json and a layer's number."""

    qkv_bias: Callable[[dict[str, Any]], bool] = lambda hf: hf.get("attention_bias", False)
    out_bias: Callable[[dict[str, Any]], bool] | None = None  # None: as qkv_bias
    mlp_bias: Callable[[dict[str, Any]], bool] = lambda hf: hf.get("mlp_bias", False)
    inner: Callable[[dict[str, Any]], int] = lambda hf: hf["intermediate_size"]
    window: Callable[[dict[str, Any], int], int | None] = lambda hf, layer: None
    turned: Callable[[dict[str, Any], int], bool] = lambda hf, layer: True
    rotary: float | None = 1.0  # the share of a head, unless config.json has one; None: no rotary embedding at all
    reads_rotary_share: bool = False
    rotary_kinds: bool = False  # a table for each kind of layer
    queries_grow: bool = False  # where config.json says so, which takes a table
    norms: Callable[[dict[str, Any]], float] = lambda hf: 2  # of a layer, in hidden sizes
    last_norm: Callable[[dict[str, Any]], float] = lambda hf: 1
    float_norms: bool = False  # norms in float32
    head_norms: Callable[[dict[str, Any], int], bool] = lambda hf, layer: False
    whole_norms: bool = False  # of all queries and all keys of a token
    gated: bool = True
    ties: bool = False
    experts: Callable[[dict[str, Any], int], Experts | None] = lambda hf, layer: None
    positions: int | None = None  # learned ones: more rows than max_position_embeddings
    kv_heads: Callable[[ModelConfig], int] = lambda model: model.num_kv_heads
    sinks: bool = False
    latent: bool = False  # one latent of a token stands for keys and values of all heads


@dataclass(frozen=True)
class Experts:
    """Of one layer. ``shared``: width of the MLP beside them, 0: there is none."""

    count: int
    inner: int
    shared: int = 0
    gates_shared: bool = False
    bias: bool = False
    correction: bool = False


def shapes_of(model: ModelConfig, ranks: int = 1, dealt_to: int = 1) -> Shapes | None:
    """Of the first rank, which has no less than another one. ``dealt_to``: ranks, of all engines, that have some
    experts whole (1: each of ``ranks`` has a part of every one). None: a family that is not described here. Raises
    ConfigError where ``ranks`` cannot share the model."""
    family = _FAMILIES.get(model.architecture)
    if family is None or model.reads_images:  # a tower is not described here
        return None
    hf, hidden, size = model.hf_config, model.hidden_size, model.head_size
    kv_heads = family.kv_heads(model)
    heads = divide(model.num_heads, ranks, "num_attention_heads")
    local = kv_heads * max(1, ranks // kv_heads)
    local = 1 if family.latent else divide(local, ranks, "num_key_value_heads")
    embedding = hf.get("word_embed_proj_dim") or hidden if model.architecture == "OPTForCausalLM" else hidden
    tied = bool(hf.get("tie_word_embeddings", family.ties))
    found = Shapes(-(-model.vocab_size // ranks), embedding, tied)
    norms = 0.0
    out_bias = family.out_bias or family.qkv_bias
    kinds = set()
    for layer in range(model.num_layers):
        window = family.window(hf, layer)
        if family.rotary is not None and family.turned(hf, layer):
            kinds.add(SLIDING if window is not None and family.rotary_kinds else FULL)
        at, width = f"model.layers.{layer}.self_attn.", heads * size
        if family.latent:
            width = heads * hf["v_head_dim"]
            norms += _add_latent(found, at, model, heads, bool(family.qkv_bias(hf)))
        else:
            found.specs.append(KVCacheSpec(local, size, model.dtype, window=window))
            inputs = _below(at, "q_proj", "k_proj", "v_proj")
            rows = (heads * size, local * size, local * size)
            found.linears.append(Linear(rows, hidden, inputs, bool(family.qkv_bias(hf))))
        found.linears.append(Linear((hidden,), width, _below(at, "o_proj"), bool(out_bias(hf))))
        norms += family.norms(hf) * hidden
        if family.head_norms(hf, layer):
            norms += 2 * size
        if family.whole_norms:
            norms += (model.num_heads + kv_heads) * size  # on every rank
        if family.sinks:
            found.floats += heads
        _add_mlp(found, family, hf, hidden, layer, ranks, dealt_to)
    norms += family.last_norm(hf) * hidden
    if family.float_norms:
        found.floats += int(norms)
    else:
        found.plain += int(norms)
    if family.positions is not None:
        found.plain += (hf["max_position_embeddings"] + family.positions) * hidden
    if embedding != hidden:
        found.linears.append(Linear((hidden,), embedding, ("model.project_in",)))
        found.linears.append(Linear((embedding,), hidden, ("model.project_out",)))
    found.tables = len(kinds) * model.max_model_len * _turned_size(model, family)
    if family.queries_grow and (grows := query_growth(hf)) and model.max_model_len > grows[0]:
        found.tables += model.max_model_len * size
    found.linears.append(Linear((found.vocab,), embedding, ("lm_head",), kind="head"))
    return found


def _add_latent(found: Shapes, at: str, model: ModelConfig, heads: int, bias: bool) -> int:
    """What makes queries and latents, of which every rank has all. Returns the numbers of their norms."""
    hf, hidden, turned = model.hf_config, model.hidden_size, model.head_size
    latent, rank = int(hf["kv_lora_rank"]), int(hf.get("q_lora_rank") or 0)
    queries = heads * (hf["qk_nope_head_dim"] + turned)
    if rank:
        found.linears.append(Linear((rank,), hidden, _below(at, "q_a_proj"), bias))
        found.linears.append(Linear((queries,), rank, _below(at, "q_b_proj")))
    else:
        found.linears.append(Linear((queries,), hidden, _below(at, "q_proj")))
    found.linears.append(Linear((latent + turned,), hidden, _below(at, "kv_a_proj_with_mqa"), bias))
    made = heads * (hf["qk_nope_head_dim"] + hf["v_head_dim"])
    found.linears.append(Linear((made,), latent, _below(at, "kv_b_proj"), kind="latent"))
    found.specs.append(KVCacheSpec(1, latent + turned, model.dtype, kind="mla"))
    return rank + latent


def _add_mlp(
    found: Shapes, family: Family, hf: dict[str, Any], hidden: int, layer: int, ranks: int, dealt_to: int
) -> None:
    experts, at = family.experts(hf, layer), f"model.layers.{layer}.mlp."
    if experts is None:
        inner = divide(family.inner(hf), ranks, "intermediate_size")
        _add_dense(found, at, family.gated, hidden, inner, bool(family.mlp_bias(hf)))
        return
    count = experts.count
    found.linears.append(Linear((count,), hidden, _below(at, "gate"), experts.bias, "exact"))
    if experts.correction:
        found.floats += count
    inner = experts.inner
    if dealt_to > 1:
        count = len(deal(count, 0, dealt_to))
    else:
        inner = divide(inner, ranks, "the experts' inner size")
    gates, downs = _below(f"{at}experts.", "gate_proj", "up_proj"), _below(f"{at}experts.", "down_proj")
    found.linears.append(Linear((inner, inner), hidden, gates, experts.bias, "expert", count))
    found.linears.append(Linear((hidden,), inner, downs, experts.bias, "expert", count))
    if experts.shared:
        inner = divide(experts.shared, ranks, "the shared expert's inner size")
        _add_dense(found, f"{at}shared_expert.", True, hidden, inner, False)
    if experts.gates_shared:
        found.linears.append(Linear((1,), hidden, _below(at, "shared_expert_gate"), False, "exact"))


def _add_dense(found: Shapes, at: str, gated: bool, hidden: int, inner: int, bias: bool) -> None:
    first, last = (_below(at, "gate_proj", "up_proj"), "down_proj") if gated else (_below(at, "fc1"), "fc2")
    found.linears.append(Linear((inner,) * len(first), hidden, first, bias))
    found.linears.append(Linear((hidden,), inner, _below(at, last), bias))


def _below(at: str, *names: str) -> tuple[str, ...]:
    return tuple(at + name for name in names)


def _turned_size(model: ModelConfig, family: Family) -> int:
    share = family.rotary or 1.0
    hf = model.hf_config
    if family.reads_rotary_share:
        stated = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        found = stated.get("partial_rotary_factor")
        share = hf.get("partial_rotary_factor", share) if found is None else found
    return int(model.head_size * share)


def _types(pattern: int, first: int = 1) -> Callable[[dict[str, Any], int], bool]:
    """Whether a layer has a window: as layer_types say, else all but every ``pattern``-th."""

    def slides(hf: dict[str, Any], layer: int) -> bool:
        types = hf.get("layer_types")
        if types:
            return bool(types[layer] == SLIDING)
        return bool((layer + first) % hf.get("sliding_window_pattern", pattern))

    return slides


def _window_of(slides: Callable[[dict[str, Any], int], bool]) -> Callable[[dict[str, Any], int], int | None]:
    return lambda hf, layer: hf.get("sliding_window", 4096) if slides(hf, layer) else None


def _qwen_window(hf: dict[str, Any], layer: int) -> int | None:
    if not hf.get("use_sliding_window", False):
        return None
    types = hf.get("layer_types")
    slides = types[layer] == SLIDING if types else layer >= hf.get("max_window_layers", 28)
    return hf.get("sliding_window", 4096) if slides else None


def _qwen2_moe_window(hf: dict[str, Any], layer: int) -> int | None:
    types = hf.get("layer_types")
    slides = types[layer] == SLIDING if types else layer % 2 == 0 and layer < hf.get("max_window_layers", 28)
    return _qwen3_moe_window(hf, layer) if slides else None


def _qwen3_moe_window(hf: dict[str, Any], layer: int) -> int | None:
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None


def _smollm3_turned(hf: dict[str, Any], layer: int) -> bool:
    turns = hf.get("no_rope_layers")
    return bool(turns[layer] if turns else (layer + 1) % hf.get("no_rope_layer_interval", 4))


def _smollm3_window(hf: dict[str, Any], layer: int) -> int | None:
    types = hf.get("layer_types")
    slides = hf.get("use_sliding_window") and (types[layer] == SLIDING if types else not _smollm3_turned(hf, layer))
    return hf.get("sliding_window") if slides else None


def _exaone_turned(hf: dict[str, Any], layer: int) -> bool:
    return _types(4)(hf, layer) or hf.get("sliding_window", 4096) is None


def _falcon_norms(hf: dict[str, Any]) -> float:
    new = hf.get("new_decoder_architecture", False)
    if not new and not hf.get("parallel_attn", True):
        return 4
    return 4 if new and hf.get("num_ln_in_parallel_attn", 2) == 2 else 2


def _falcon_kv_heads(model: ModelConfig) -> int:
    hf = model.hf_config
    one = hf.get("multi_query", True) and not hf.get("new_decoder_architecture")
    return 1 if one else model.num_kv_heads


def _opt_last(hf: dict[str, Any]) -> float:
    there = hf.get("do_layer_norm_before", True) and not hf.get("_remove_final_layer_norm", False)
    return _opt_norms(hf) / 2 if there else 0


def _opt_norms(hf: dict[str, Any]) -> float:
    return 4 if hf.get("layer_norm_elementwise_affine", True) else 0


def _gpt_oss_window(hf: dict[str, Any], layer: int) -> int | None:
    types = hf.get("layer_types")
    slides = types[layer] == SLIDING if types else layer % 2 == 0
    return hf.get("sliding_window") if slides else None


def _qwen_experts(hf: dict[str, Any], layer: int) -> Experts | None:
    if layer in (hf.get("mlp_only_layers") or []) or (layer + 1) % hf.get("decoder_sparse_step", 1):
        return None
    shared = hf.get("shared_expert_intermediate_size") or 0
    return Experts(hf["num_experts"], hf["moe_intermediate_size"], shared, bool(shared))


def _glm_experts(hf: dict[str, Any], layer: int) -> Experts | None:
    if layer < hf.get("first_k_dense_replace", 1):
        return None
    inner = hf["moe_intermediate_size"]
    return Experts(hf["num_experts"], inner, inner * hf.get("n_shared_experts", 1), correction=True)


def _deepseek_experts(correction: bool) -> Callable[[dict[str, Any], int], Experts | None]:
    def experts(hf: dict[str, Any], layer: int) -> Experts | None:
        if layer < hf["first_k_dense_replace"]:
            return None
        inner = hf["moe_intermediate_size"]
        return Experts(hf["num_experts"], inner, inner * (hf.get("n_shared_experts") or 0), correction=correction)

    return experts


def _all_experts(hf: dict[str, Any], layer: int) -> Experts | None:
    return Experts(hf["num_experts"], hf["intermediate_size"], hf.get("shared_intermediate_size") or 0)


def _bias(name: str, default: bool) -> Callable[[dict[str, Any]], bool]:
    return lambda hf: hf.get(name, default)


def _never(hf: dict[str, Any]) -> bool:
    return False


def _always(hf: dict[str, Any]) -> bool:
    return True


def _four(hf: dict[str, Any]) -> float:
    return 4


def _two(hf: dict[str, Any]) -> float:
    return 2


_LLAMA = Family()
_MISTRAL = Family(qkv_bias=_never, window=lambda hf, layer: hf.get("sliding_window", 4096), queries_grow=True)
_QWEN2 = Family(qkv_bias=_always, out_bias=_never, window=_qwen_window)
_QWEN3 = Family(window=_qwen_window, head_norms=lambda hf, layer: True)
_GEMMA2 = Family(
    window=lambda hf, layer: hf["sliding_window"] if hf["layer_types"][layer] == SLIDING else None,
    norms=_four, float_norms=True, mlp_bias=_never, ties=False,
)  # fmt: skip
_GEMMA3 = Family(
    window=_GEMMA2.window, norms=_four, float_norms=True, mlp_bias=_never, rotary_kinds=True,
    head_norms=lambda hf, layer: True,
)  # fmt: skip
_GLM = dict[str, Any](qkv_bias=_bias("attention_bias", True), out_bias=_never, mlp_bias=_never, rotary=0.5,
                      reads_rotary_share=True)  # fmt: skip
_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "MinistralForCausalLM": Family(
        qkv_bias=_never, window=lambda hf, layer: _MISTRAL.window(hf, layer)
        if not hf.get("layer_types") or hf["layer_types"][layer] == SLIDING else None,
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "GemmaForCausalLM": Family(float_norms=True, mlp_bias=_never),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(
        qkv_bias=_never, mlp_bias=_never, window=lambda hf, layer: hf.get("sliding_window"), reads_rotary_share=True
    ),
    "GraniteForCausalLM": _LLAMA,
    "GraniteMoeForCausalLM": Family(experts=_all_experts),
    "GraniteMoeSharedForCausalLM": Family(experts=_all_experts),
    "SmolLM3ForCausalLM": Family(ties=True, turned=_smollm3_turned, window=_smollm3_window),
    "Olmo2ForCausalLM": Family(whole_norms=True, mlp_bias=_never),
    "Olmo3ForCausalLM": Family(
        whole_norms=True, mlp_bias=_never, window=_window_of(_types(4)), rotary_kinds=True
    ),
    "DeepseekV2ForCausalLM": Family(latent=True, experts=_deepseek_experts(False)),
    "DeepseekV3ForCausalLM": Family(latent=True, experts=_deepseek_experts(True)),
    "OlmoeForCausalLM": Family(whole_norms=True, experts=_all_experts),
    "GlmForCausalLM": Family(**_GLM),
    "Glm4ForCausalLM": Family(**_GLM, norms=_four),
    "Glm4MoeForCausalLM": Family(
        out_bias=_never, rotary=0.5, reads_rotary_share=True, experts=_glm_experts,
        head_norms=lambda hf, layer: hf.get("use_qk_norm", False),
    ),
    "CohereForCausalLM": Family(ties=True, norms=lambda hf: 1),
    "Cohere2ForCausalLM": Family(
        ties=True, norms=lambda hf: 1, window=_window_of(_types(4)), turned=_types(4)
    ),
    "InternLM2ForCausalLM": Family(qkv_bias=_bias("bias", False)),
    "InternLM3ForCausalLM": Family(
        qkv_bias=_bias("qkv_bias", False), out_bias=_bias("bias", False), mlp_bias=_bias("bias", False)
    ),
    "Starcoder2ForCausalLM": Family(
        qkv_bias=_bias("use_bias", True), mlp_bias=_bias("use_bias", True), ties=True, gated=False, norms=_four,
        last_norm=_two, window=lambda hf, layer: hf.get("sliding_window"),
    ),
    "GPTNeoXForCausalLM": Family(
        qkv_bias=_bias("attention_bias", True), mlp_bias=_always, gated=False, norms=_four, last_norm=_two,
        rotary=0.25, reads_rotary_share=True,
    ),
    "StableLmForCausalLM": Family(
        out_bias=_never, last_norm=_two, rotary=0.25, reads_rotary_share=True,
        norms=lambda hf: 2 if hf.get("use_parallel_residual", False) else 4,
    ),
    "FalconForCausalLM": Family(
        qkv_bias=_bias("bias", False), mlp_bias=_bias("bias", False), gated=False, ties=True, norms=_falcon_norms,
        last_norm=_two, kv_heads=_falcon_kv_heads,
    ),
    "GPT2LMHeadModel": Family(
        qkv_bias=_always, mlp_bias=_always, gated=False, ties=True, norms=_four, last_norm=_two, rotary=None,
        positions=0,
    ),
    "OPTForCausalLM": Family(
        qkv_bias=_bias("enable_bias", True), mlp_bias=_bias("enable_bias", True), inner=lambda hf: hf["ffn_dim"],
        gated=False, ties=True, norms=_opt_norms, last_norm=_opt_last, rotary=None, positions=2,
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias=_bias("attention_bias", True), out_bias=_bias("attention_out_bias", False)
    ),
    "Ernie4_5ForCausalLM": Family(ties=True, qkv_bias=_bias("use_bias", False), mlp_bias=_bias("use_bias", False)),
    "Exaone4ForCausalLM": Family(
        qkv_bias=_never, mlp_bias=_never, window=_window_of(_types(4)), turned=_exaone_turned,
        head_norms=lambda hf, layer: True,
    ),
    "GptOssForCausalLM": Family(
        qkv_bias=_bias("attention_bias", True), window=_gpt_oss_window, float_norms=True, sinks=True,
        experts=lambda hf, layer: Experts(hf["num_experts"], hf["intermediate_size"], bias=True),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=_never, window=_MISTRAL.window,
        experts=lambda hf, layer: Experts(hf["num_experts"], hf["intermediate_size"]),
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=_bias("qkv_bias", True), out_bias=_never, window=_qwen2_moe_window, experts=_qwen_experts
    ),
    "Qwen3MoeForCausalLM": Family(
        window=_qwen3_moe_window, head_norms=lambda hf, layer: True, experts=_qwen_experts
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        window=_qwen3_moe_window, head_norms=lambda hf, layer: True, experts=_qwen_experts
    ),
}  # fmt: skip
