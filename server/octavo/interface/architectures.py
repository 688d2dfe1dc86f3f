"""The architectures that are built, by the name that config.json gives them, and how each writes its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from octavo.errors import ModelError

# Architecture -> module of octavo.models. A new family is a line here; what follows is for config.json that differs.
MODELS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GlmForCausalLM": "glm4",
    "Glm4ForCausalLM": "glm4",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm2",
    "MinistralForCausalLM": "llama",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "StableLmForCausalLM": "stablelm",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Qwen2VLForConditionalGeneration": "qwen_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "text_of_vision",
    "Gemma4ForConditionalGeneration": "text_of_vision",
    "Gemma4UnifiedForConditionalGeneration": "text_of_vision",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_next",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForSequenceClassification": "classifiers",
    "MistralForSequenceClassification": "classifiers",
    "Qwen2ForSequenceClassification": "classifiers",
    "Qwen3ForSequenceClassification": "classifiers",
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "bert",
    "RobertaForMaskedLM": "bert",
    "RobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
    "XLMRobertaForMaskedLM": "bert",
    "XLMRobertaForSequenceClassification": "bert",
    "DistilBertModel": "bert",
    "DistilBertForMaskedLM": "bert",
    "DistilBertForSequenceClassification": "bert",
    "GteModel": "gte",
    "GteForMaskedLM": "gte",
    "GteForSequenceClassification": "gte",
    "NewModel": "gte",
    "NewForMaskedLM": "gte",
    "NewForSequenceClassification": "gte",
    "NomicBertModel": "nomic_bert",
    "NomicBertForMaskedLM": "nomic_bert",
    "NomicBertForSequenceClassification": "nomic_bert",
    "ModernBertModel": "modernbert",
    "ModernBertForMaskedLM": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
}
# Those whose tokens of images have three positions.
M_ROPE = {
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}  # fmt: skip
# Those that read images, where the checkpoint has a tower for them.
IMAGE_READERS = M_ROPE | {
    "LlavaForConditionalGeneration", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration",
}  # fmt: skip
# Those whose image tokens see each other in both directions.
SEES_IMAGES_WHOLE = {"Gemma3ForConditionalGeneration"}
# Those that read whole texts, to both sides, and cannot write any; whose checkpoints may know learned positions alone.
ENCODERS = {name for name, module in MODELS.items() if module in ("bert", "nomic_bert", "gte", "modernbert")}
_LEARNED_POSITIONS = {name for name in ENCODERS if name.startswith(("Bert", "Roberta", "XLMRoberta", "DistilBert"))}
_DISTIL_BERT = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers", "activation": "hidden_act",
}  # fmt: skip
_NOMIC_BERT = {  # as released; transformers has others' words. Positions beyond those of its training are not for it.
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings",
    "max_trained_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
_MODERN_BERT = {
    "hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps", "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_local_base_freq",
}  # fmt: skip
_GEMMA_1: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 256, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_2 = _GEMMA_1 | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA_3 = _GEMMA_2 | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
_GEMMA_3N: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512, "sliding_window_pattern": 5,
    "final_logit_softcapping": 30.0, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15,
    "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 64,
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "head_dim": 256, "global_head_dim": 512, "tie_word_embeddings": True, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
_GEMMA_4_UNIFIED = _GEMMA_4 | {
    "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
# Heads of latent attention have several sizes; what is turned is `head_dim`, as in transformers.
_DEEPSEEK_NAMES = {**_EXPERTS, "qk_rope_head_dim": "head_dim"}
_DEEPSEEK_V2: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "num_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "num_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_LLAMA_4: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "num_experts_per_tok": 1, "num_experts": 16,
    "num_key_value_heads": 8,
}  # fmt: skip
_GRANITE_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
# Fields of config.json that mean what others call by another name.
ALIASES: dict[str, Mapping[str, str]] = {
    "MixtralForCausalLM": _EXPERTS,
    "Qwen2MoeForCausalLM": _EXPERTS,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "Qwen3VLMoeForConditionalGeneration": _EXPERTS,
    "OlmoeForCausalLM": _EXPERTS,
    "GraniteMoeForCausalLM": _EXPERTS,
    "GraniteMoeSharedForCausalLM": _EXPERTS,
    "Glm4MoeForCausalLM": _EXPERTS,
    "Llama4ForCausalLM": _EXPERTS,
    "Llama4ForConditionalGeneration": _EXPERTS,
    "GptOssForCausalLM": _EXPERTS,
    "Gemma4ForCausalLM": {"top_k_experts": "num_experts_per_tok"},
    "Gemma4ForConditionalGeneration": {"top_k_experts": "num_experts_per_tok"},
    "DeepseekV2ForCausalLM": _DEEPSEEK_NAMES,
    "DeepseekV3ForCausalLM": _DEEPSEEK_NAMES,
    "Starcoder2ForCausalLM": {"norm_epsilon": "layer_norm_eps"},
    "StableLmForCausalLM": {"use_qkv_bias": "attention_bias"},
    "GPTNeoXForCausalLM": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "FalconForCausalLM": {
        "num_kv_heads": "num_key_value_heads", "n_head_kv": "num_key_value_heads", "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers", "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "GPT2LMHeadModel": {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    **{name: _MODERN_BERT for name in MODELS if name.startswith("ModernBert")},
    **{name: _NOMIC_BERT for name in MODELS if name.startswith("NomicBert")},
    **{name: _DISTIL_BERT for name in MODELS if name.startswith("DistilBert")},
}  # fmt: skip
_LLAVA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
_MISTRAL = _LLAVA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN_2 = _LLAVA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
# Of LLaVAs, by the model_type of text_config, which is one of these: what that leaves out.
LLAVA_TEXTS: dict[str, Mapping[str, Any]] = {"llama": _LLAVA, "mistral": _MISTRAL, "qwen2": _QWEN_2}
# What config.json means by leaving a field out, where transformers has a default of the family.
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5},
    "Idefics3ForConditionalGeneration": _LLAVA,  # what text_config leaves out is Llama's
    "SmolVLMForConditionalGeneration": _LLAVA,
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    "Qwen2MoeForCausalLM": {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632, "use_sliding_window": False,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4,
    },
    "Qwen2VLForConditionalGeneration": {"rope_theta": 1e6},
    "Qwen2_5_VLForConditionalGeneration": {"rope_theta": 1e6},
    "Qwen3VLForConditionalGeneration": {"rope_theta": 5e5},
    "Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True, "rope_theta": 5e5},
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE,
    "Glm4MoeForCausalLM": {
        "rms_norm_eps": 1e-5, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "num_key_value_heads": 8,
    },
    "Llama4ForCausalLM": _LLAMA_4,
    "Llama4ForConditionalGeneration": _LLAMA_4,
    "MixtralForCausalLM": {
        "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "num_key_value_heads": 8,
    },
    "SmolLM3ForCausalLM": {"rope_theta": 2e6, "num_key_value_heads": 4},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "GlmForCausalLM": {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128},
    "Glm4ForCausalLM": {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128},
    "CohereForCausalLM": {"rope_theta": 5e5},
    "Starcoder2ForCausalLM": {"num_key_value_heads": 2},
    "FalconForCausalLM": {"max_position_embeddings": 2048},
    "GptOssForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "SeedOssForCausalLM": {"num_key_value_heads": 8, "head_dim": 128},
    "Ernie4_5ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "StableLmForCausalLM": {"num_key_value_heads": 32},
    "Exaone4ForCausalLM": {"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
    "GemmaForCausalLM": _GEMMA_1,
    "Gemma2ForCausalLM": _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": _GEMMA_3N,
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    "Gemma4UnifiedForCausalLM": _GEMMA_4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA_4_UNIFIED,
    **{name: {"rope_theta": 160000.0, "rope_local_base_freq": 10000.0} for name in MODELS if "ModernBert" in name},
    **{name: {"type_vocab_size": 1} for name in MODELS if MODELS[name] == "gte"},
    **{name: {"type_vocab_size": 1, "rope_theta": 160000.0} for name in MODELS if name.startswith("Gte")},
    **{name: {"rope_theta": 1000.0} for name in MODELS if name.startswith("NomicBert")},
    **{name: {"type_vocab_size": 0} for name in MODELS if name.startswith("DistilBert")},
    # The released config.json states of text_config what differs from the 4B's.
    "Gemma3ForConditionalGeneration": _GEMMA_3
    | {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
# Fields whose null says that there is none, where leaving them out means a default of the family.
NONE_BY_NULL = {
    "sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping", "hidden_size_per_layer_input",
}  # fmt: skip
# Families without rotary embeddings, and those whose heads are turned whole whatever partial_rotary_factor says.
WITHOUT_ROTARY = {"OPTForCausalLM", "GPT2LMHeadModel"} | _LEARNED_POSITIONS
WHOLE_ROTARY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} | {
    name for name, module in MODELS.items() if module == "classifiers"
}
# Families whose MLP is four times as wide as hidden states, where config.json does not say.
FOURFOLD = {"FalconForCausalLM", "GPT2LMHeadModel"}
# What layer_types may say beside full_attention and sliding_attention; the model refuses what it does not have.
_CHUNKED = ("full_attention", "chunked_attention")
LAYER_TYPES = {
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "GraniteMoeHybridForCausalLM": ("full_attention", "attention", "mamba", "linear_attention"),
}

_STATE_SPACE = re.compile(
    r"Mamba|Jamba|Zamba|Bamba|Rwkv|RWKV|FalconH1|NemotronH|Qwen3_5|Qwen3_6|Qwen3Next|Lfm2|RecurrentGemma|Plamo2|"
    r"KimiLinear|xLSTM|MiniMaxText|MiniMaxM1"
)


# What guesses tokens for a model of that architecture with layers behind its last one, see `octavo.models.mtp`.
PREDICTION_LAYERS = {"DeepseekV3ForCausalLM": "DeepSeekMTPModel", "Glm4MoeForCausalLM": "Glm4MoeMTPModel"}
# Models that guess tokens, by the names that they have here -> module of octavo.models.
DRAFTERS = {
    **dict.fromkeys(PREDICTION_LAYERS.values(), "mtp"),
    **dict.fromkeys(("EagleModel", "Eagle3Model", "Eagle3Qwen3Model"), "eagle"),
    "MedusaModel": "medusa",
}
# Of Medusa's tensors: what checkpoints call them, its authors' among them, and what `octavo.models.medusa` does.
MEDUSA_NAMES: list[tuple[str, str | None]] = [
    (r"^medusa_heads?\.", ""),
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    (r"^lm_head\.", "lm_heads.0."),
    (r"^token_map$", "vocabulary.token_map"),
]


def check_architecture(name: str) -> None:
    """Raise ModelError, which names the nearest that is there, for an architecture that is not built."""
    if name in MODELS:
        return
    if not name:
        raise ModelError(
            "config.json names no architecture, that is not supported; docs/models.md lists those that are"
        )
    why = " (it has state-space or linear-attention layers)" if has_recurrent_layers(name) else ""
    raise ModelError(
        f"architecture {name!r} is not supported{why}; the nearest that is: {_nearest_architecture(name)} "
        "(docs/models.md lists all)"
    )


def has_recurrent_layers(name: str) -> bool:
    """True if the name of an architecture is one of those with a state beside keys and values."""
    return _STATE_SPACE.search(name) is not None


def _nearest_architecture(name: str) -> str:
    """Of the same task where there is one: the endings that tasks share say nothing about the family."""
    family, task = _family_and_task(name)
    same_task = [known for known in MODELS if _family_and_task(known)[1] == task] or list(MODELS)
    return max(same_task, key=lambda known: SequenceMatcher(None, family, _family_and_task(known)[0]).ratio())


def _family_and_task(name: str) -> tuple[str, str]:
    family, separator, task = name.partition("For")
    return family.lower(), separator + task


def own_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Common name -> the family's own, of the fields that config.json states by another name."""
    aliases = ALIASES.get(config["architectures"][0], {})
    return {common: own for own, common in aliases.items() if config.get(own) is not None}


def in_common_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the family's own fields under their common names, and its defaults."""
    architecture = config["architectures"][0]
    aliases = ALIASES.get(architecture, {})
    found = {key: value for key, value in config.items() if key not in aliases}
    for own, common in aliases.items():
        if config.get(own) is not None:
            found[common] = config[own]
    if architecture in FOURFOLD and found.get("intermediate_size") is None and type(found.get("hidden_size")) is int:
        found["intermediate_size"] = 4 * found["hidden_size"]
    defaults = DEFAULTS.get(architecture, {})
    if architecture.startswith("Llava"):
        defaults = LLAVA_TEXTS.get(str(config.get("model_type")), _LLAVA)
    for key, value in defaults.items():
        if found.get(key) is None and not (key in found and key in NONE_BY_NULL):
            found[key] = value
    return found
