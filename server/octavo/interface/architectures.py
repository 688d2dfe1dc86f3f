"""The architectures that are built, by the name that config.json gives them."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from octavo.errors import ModelError

# Architecture -> module of octavo.models, and of octavo.interface.model_config. A new family is a line here.
MODELS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "OPTForCausalLM": "opt",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "BambaForCausalLM": "bamba",
    "NemotronHForCausalLM": "nemotron_h",
    "FalconH1ForCausalLM": "falcon_h1",
    "Mamba2ForCausalLM": "mamba2",
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
    "Qwen3_5ForConditionalGeneration": "qwen_vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen_vl",
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
    "Gemma3TextModel": "embedding_gemma",
}
# Architectures whose image tokens have three positions.
M_ROPE = {
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
# Architectures that read images, if the checkpoint has a tower for them.
IMAGE_READERS = M_ROPE | {
    "LlavaForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
}
# Architectures whose image tokens see each other in both directions.
SEES_IMAGES_WHOLE = {"Gemma3ForConditionalGeneration"}
# Architectures that read whole texts, to both sides, and cannot write any.
_ENCODERS = ("bert", "nomic_bert", "gte", "modernbert", "embedding_gemma")
ENCODERS = {name for name, module in MODELS.items() if module in _ENCODERS}

_STATE_SPACE = re.compile(
    r"Mamba|Jamba|Zamba|Bamba|Rwkv|RWKV|FalconH1|NemotronH|Qwen3_6|Qwen3Next|Lfm2|RecurrentGemma|Plamo2|"
    r"KimiLinear|xLSTM|MiniMaxText|MiniMaxM1"
)


# Drafters for a model of that architecture, with layers behind its last one, see `octavo.models.mtp`.
PREDICTION_LAYERS = {
    "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "Qwen3_5ForCausalLM": "Qwen3_5MTPModel",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5MTPModel",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeMTPModel",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeMTPModel",
}
# Models that guess tokens, by the names that they have here -> module of octavo.models.
DRAFTERS = {
    **dict.fromkeys(PREDICTION_LAYERS.values(), "mtp"),
    **dict.fromkeys(("EagleModel", "Eagle3Model", "Eagle3Qwen3Model"), "eagle"),
    "MedusaModel": "medusa",
}
# Names of Medusa's tensors in checkpoints, its authors' among them, and in `octavo.models.medusa`.
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
    """Prefer architectures of the same task: task suffixes, which families share, say nothing about the family."""
    family, task = _family_and_task(name)
    same_task = [known for known in MODELS if _family_and_task(known)[1] == task] or list(MODELS)
    return max(same_task, key=lambda known: SequenceMatcher(None, family, _family_and_task(known)[0]).ratio())


def _family_and_task(name: str) -> tuple[str, str]:
    family, separator, task = name.partition("For")
    return family.lower(), separator + task
