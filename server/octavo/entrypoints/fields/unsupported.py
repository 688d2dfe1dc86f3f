"""Unsupported request fields that would change the output: of vLLM, llama.cpp, SGLang, TGI, Ollama and OpenAI.

Each is refused by name, unless its value asks for the default. The same tables give the checks and /openapi.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Values = tuple[Any, ...]

_EMPTY: Values = ("", [], {})  # some clients send these for what is not set

# Name -> the values without effect, () for the empty ones; null is always one of them.
_GENERATION: dict[str, Values] = {
    **dict.fromkeys(
        (
            # OpenAI's
            "audio",
            "web_search_options",
            "moderation",
            "thread",
            "functions",
            "function_call",
            "reasoning",
            # vLLM's
            "logits_processors",
            "prompt_embeds",
            "kv_transfer_params",
            "ec_transfer_params",
            "mm_processor_kwargs",
            "media_io_kwargs",
            "vllm_xargs",
            "extra_args",
            "structural_tag",
            "repetition_detection",
            "guided_whitespace_pattern",
            "guided_json_object",
            "lora_request",
            # llama.cpp's
            "grammar",
            "grammar_triggers",
            "preserved_tokens",
            "n_predict",
            "n_cmpl",
            "n_indent",
            "samplers",
            "image_data",
            "multimodal_data",
            "multi_modal_data",
            "lora",
            "response_fields",
            "t_max_prompt_ms",
            "t_max_predict_ms",
            "input_prefix",
            "input_suffix",
            "input_extra",
            "system_prompt",
            "generation_prompt",
            "chat_format",
            # SGLang's
            "ebnf",
            "stop_regex",
            "lora_path",
            "session_params",
            "custom_params",
            "custom_logit_processor",
            "input_ids",
            "input_embeds",
            "min_new_tokens",
            # TGI's and transformers'
            "max_new_tokens",
            "max_length",
            "adapter_id",
            "tool_prompt",
            "guideline",
            "truncate",
            "random_seed",
            "negative_prompt",
            "suppress_tokens",
            "bad_words_ids",
            "force_words_ids",
            "eos_token_id",
            "forced_eos_token_id",
            "stop_sequences",
            "stopping_strings",
            # Ollama's
            "format",
            "options",
            "think",
            "template",
            "system",
            "context",
            "images",
            "num_ctx",
            "num_predict",
            # Others'
            "thinking",
            "enable_thinking",
            "custom_token_bans",
            "banned_tokens",
            "banned_strings",
        ),
        (),
    ),
    **dict.fromkeys(
        (
            "watermarking",
            "return_prompt_text",
            "grammar_lazy",
            "post_sampling_probs",
            "thinking_forced_open",
            "reasoning_in_content",
            "no_stop_trim",
            "return_hidden_states",
            "watermark",
            "raw",
            "safe_prompt",
            "penalize_nl",
            "early_stopping",
            "return_full_text",
            "details",
            "decoder_input_details",
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            "dynatemp_range",
            "mirostat",
            "mirostat_mode",
            "n_probs",
            "min_keep",
            "n_keep",
            "n_discard",
            "top_a",
            "smoothing_factor",
            "eta_cutoff",
            "epsilon_cutoff",
            "penalty_alpha",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "min_length",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            "typical_p",
            "tfs",
            "tfs_z",
            "repeat_penalty",
            "num_beams",
            "num_beam_groups",
            "guidance_scale",
            "diversity_penalty",
            "num_return_sequences",
            "encoder_repetition_penalty",
        ),
        (1,),
    ),
    "modalities": (["text"],),
    "do_sample": (True,),
    "separate_reasoning": (True,),
    "nsigma": (0,),
    "adaptive_target": (-1,),
    "reasoning_format": ("auto",),
}

# Fields of the one route that mean nothing to the other, since some clients send one body to both.
_CHAT: dict[str, Values] = {
    "suffix": ("",),
    "best_of": (1,),
    "instructions": (),
}
_COMPLETION: dict[str, Values] = {
    **dict.fromkeys(
        (
            "max_completion_tokens",
            "chat_template",
            "chat_template_kwargs",
            "documents",
            "reasoning_effort",
            "instructions",
            "prediction",
        ),
        (),
    ),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), (False,)),
    **dict.fromkeys(
        ("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"), (-1,)
    ),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}

_PROCESSORS = "logit_bias, bad_words, allowed_token_ids or structured_outputs"
# The supported field to use instead.
_INSTEAD = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_cmpl": "n",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stopping_strings": "stop",
    "n_probs": "logprobs",
    "reasoning": "reasoning_effort",
    "thinking": "chat_template_kwargs",
    "enable_thinking": "chat_template_kwargs",
    "think": "chat_template_kwargs",
    "functions": "tools",
    "function_call": "tool_choice",
    "format": "response_format",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "best_of": "n",
    "grammar": "structured_outputs.grammar",
    "ebnf": "structured_outputs.grammar",
    "truncate": "truncate_prompt_tokens",
    "banned_strings": "bad_words",
    "guided_json_object": "response_format",
    "content": "prompt",
    "options": "the fields in it",
    "activation": "use_activation",
    "eos_token_id": "stop_token_ids",
    "add_special": "add_special_tokens",
    "with_pieces": "return_token_strs",
    "web_search_options": "tools, with one of yours that searches",
    "modalities": '["text"]',
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "moderation": "/v1/decisions",
    "thread": "messages, with the whole conversation",
    "prediction": "/v1/chat/completions",
}

_EMBEDDING: dict[str, Values] = {
    **dict.fromkeys(
        (
            "mm_processor_kwargs",
            "media_io_kwargs",
            "task",
            "task_type",
            "instruction",
            "instruct",
            "embedding_type",
            "embedding_types",
            "options",
            "image",
            "lora_path",
            "late_chunking",
            "content",
        ),
        (),
    ),
    "truncate": (False, "NONE"),
    "embd_normalize": (2,),
    "padding": ("do_not_pad",),
}

_SCORING: dict[str, Values] = {
    **dict.fromkeys(
        (
            "max_chunks_per_doc",
            "instruction",
            "instruct",
            "messages",
            "image",
            "mm_processor_kwargs",
            "chat_template",
            "chat_template_kwargs",
            "lora_path",
        ),
        (),
    ),
    "rank_fields": ([], ["text"]),
    "truncation_side": ("right",),
    "truncate": (False, "NONE"),
    "activation": (True,),
    "raw_scores": (False,),
}

_TOKENIZE: dict[str, Values] = {
    **dict.fromkeys(
        (
            "content",
            "mm_processor_kwargs",
            "media_io_kwargs",
            "truncate_prompt_tokens",
            "truncation_side",
            "add_special",
        ),
        (),
    ),
    "with_pieces": (False,),
    "return_token_offsets": (False,),
    "parse_special": (True,),
}

_DETOKENIZE: dict[str, Values] = {"skip_special_tokens": (False,)}

# Known fields without effect on the output, some because the sampler that they belong to is refused.
HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_interval",
        "session_id",
        "keep_alive",
        "cache_prompt",
        "id_slot",
        "timings_per_token",
        "rid",
        "custom_labels",
        "return_token_offsets",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
        "request_id",
        "cache_salt",
        "backend_sampling",
        "prompt",
        "messages",
        "input",
        "guided_decoding_backend",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "mirostat_tau",
        "mirostat_eta",
        "betas",
        "anthropic_version",
        "anthropic_beta",
        "cache_control",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
        "diagnostics",
        "client_metadata",
        "stream_options",
        "xtc_threshold",
        "dynatemp_exponent",
        "adaptive_decay",
        "smoothing_curve",
        "repeat_last_n",
    }
)


class UnsupportedFields:
    """The unsupported fields of one route."""

    def __init__(self, fields: Mapping[str, Values], instead: Mapping[str, str] = _INSTEAD) -> None:
        self._fields = {name: values or _EMPTY for name, values in fields.items()}
        self._instead = instead

    def why_not(self, name: str, value: Any) -> str | None:
        """Say why ``value`` is refused in an unsupported field; None if it is not."""
        if value is None or name not in self._fields or any(_same(value, other) for other in self._fields[name]):
            return None
        instead = self._instead.get(name)
        return f"{name} is not supported by this server: {f'use {instead}' if instead else 'drop it'}"

    def schema(self) -> dict[str, Any]:
        """The fields as JSON Schema patternProperties."""
        by_values: dict[str, tuple[Values, list[str]]] = {}
        for name, values in self._fields.items():
            by_values.setdefault(repr(values), (values, []))[1].append(re.escape(name))
        return {f"^({'|'.join(sorted(names))})$": {"enum": [None, *values]} for values, names in by_values.values()}


def _same(value: Any, other: Any) -> bool:
    """Compare as JSON Schema's enum does: 1 equals 1.0, but neither equals true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


COMPLETION = UnsupportedFields(_GENERATION | _COMPLETION, _INSTEAD | {"thread": "prompt, with the whole conversation"})
CHAT = UnsupportedFields(_GENERATION | _CHAT)
EMBEDDING = UnsupportedFields(_EMBEDDING)
SCORING = UnsupportedFields(_SCORING)
TOKENIZE = UnsupportedFields(_TOKENIZE)
DETOKENIZE = UnsupportedFields(_DETOKENIZE)
