"""vLLM's arguments that EngineArgs has no field for, by their Python names. `octavo serve` makes flags of them and
`octavo.LLM` takes them as keywords: both read these tables, so that both accept the same."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from octavo.errors import ConfigError
from octavo.system import suggestions

logger = logging.getLogger(__name__)

# Switches that are always on: name -> what that means. Turning them off is not supported.
ALWAYS = {
    "enable_chunked_prefill": "long prompts are always cut into chunks",
    "enable_prompt_tokens_details": "usage always includes the cached tokens",
    "enable_request_id_headers": "X-Request-Id is always returned",
    "enable_server_load_tracking": "/load is always there",
    "enable_offline_docs": "/docs never loads external assets",
    "disable_log_requests": "requests are logged only with --enable-log-requests",
    "async_scheduling": "steps are always scheduled ahead on a GPU",
    "disable_cascade_attn": "there is no cascade attention",
    "skip_mm_profiling": "an image's memory is computed",
    "use_v2_block_manager": "there is one block manager",
}

# Options of which only some values are supported: name -> (those values, why).
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "decode_context_parallel_size": ((1,), "one device, for now"),
    "prefill_context_parallel_size": ((1,), "one device, for now"),
    "api_server_count": ((1,), "one API process, for now"),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json decides"),
    "config_format": (("auto", "hf"), "config.json as Hugging Face writes it"),
    "model_impl": (("auto", "vllm"), "the engine's own models"),
    "runner": (("auto", "generate", "pooling"), "a model does all that its files say"),
    "convert": (("auto", "none", "embed", "classify"), "a model does all that its files say"),
    "task": (("auto", "generate", "embed", "embedding", "classify", "score"), "a model does all that its files say"),
    "chat_template_content_format": (("auto", "string"), "texts of several parts are joined"),
    "guided_decoding_backend": (
        ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
        "one backend handles all grammars",
    ),
    "logprobs_mode": (("raw_logprobs",), "before penalties and temperature"),
    "cpu_offload_gb": ((0,), "weights stay where they are; quantization int8 or a smaller GGUF file needs less room"),
    "prefix_caching_hash_algo": (("sha256", "sha256_cbor"), "blocks are found by their SHA-256"),
    "max_num_partial_prefills": ((1,), "max_num_batched_tokens decides"),
    "max_long_partial_prefills": ((1,), "max_num_batched_tokens decides"),
    "stream_interval": ((1,), "every token is sent at once"),
    "moe_backend": (("auto",), "chosen by the engine"),
    "performance_mode": (("balanced",), "chosen by the engine"),
}

# Options without effect, whatever their value: name -> (number of values on the command line, why).
NO_EFFECT: dict[str, tuple[int | str, str]] = {
    "trust_remote_code": (0, "code from model repositories never runs"),
    "code_revision": (1, "code from model repositories never runs"),
    "enable_reasoning": (0, "reasoning is split wherever the chat template shows it"),
    "swap_space": (1, "preempted requests are recomputed"),
    "preemption_mode": (1, "preempted requests are recomputed"),
    "num_scheduler_steps": (1, "every step is scheduled"),
    "multi_step_stream_outputs": ("?", "every token is sent at once"),
    "num_lookahead_slots": (1, "num_speculative_tokens of speculative_config decides"),
    "scheduler_delay_factor": (1, "prompts are never delayed"),
    "max_paddings": (1, "nothing is padded"),
    "compilation_config": (1, "nothing is compiled at the start"),
    "optimization_level": (1, "nothing is compiled at the start"),
    "max_seq_len_to_capture": (1, "steps of all lengths are recorded"),
    "max_context_len_to_capture": (1, "steps of all lengths are recorded"),
    "cudagraph_capture_sizes": ("+", "the engine chooses the sizes of captured steps"),
    "cuda_graph_sizes": ("+", "the engine chooses the sizes of captured steps"),
    "max_cudagraph_capture_size": (1, "the engine chooses the sizes of captured steps"),
    "enable_flashinfer_autotune": (0, "there is no FlashInfer"),
    "max_log_len": (1, "prompts are never logged"),
    "enable_log_deltas": (0, "answers are never logged"),
    "use_tqdm_on_load": (0, "progress is shown on terminals"),
    "safetensors_load_strategy": (1, "weights are always streamed"),
    "max_parallel_loading_workers": (1, "weights are always streamed"),
    "pt_load_map_location": (1, "Python pickles are never read"),
    "ignore_patterns": ("+", "only the files that are needed are fetched"),
    "show_hidden_metrics_for_version": (1, "no metric is hidden"),
    "aggregate_engine_logging": (0, "there is one engine"),
    "disable_async_output_proc": (0, "results are taken in while the next step runs"),
    "disable_frontend_multiprocessing": (0, "the engine always has a process of its own"),
    "tokenizer_pool_size": (1, "tokenising needs no pool"),
    "tokenizer_pool_type": (1, "tokenising needs no pool"),
    "tokenizer_pool_extra_config": (1, "tokenising needs no pool"),
    "lora_extra_vocab_size": (1, "adapters that add tokens are refused"),
    "guided_decoding_disable_fallback": (0, "one backend handles all grammars"),
    "guided_decoding_disable_additional_properties": (0, "strict_json_schema is on by default"),
    "speculative_disable_mqa_scorer": (0, "all guesses of a step are checked at once"),
    "disable_logprobs_during_spec_decoding": ("?", "log-probabilities are the model's own either way"),
    "mm_processor_cache_gb": (1, "embeddings of images are kept, see mm_encoder_cache_tokens"),
    "mm_processor_cache_type": (1, "embeddings of images are kept, see mm_encoder_cache_tokens"),
    "mm_shm_cache_max_object_size_mb": (1, "embeddings of images are kept, see mm_encoder_cache_tokens"),
    "disable_mm_preprocessor_cache": (0, "embeddings of images are kept, see mm_encoder_cache_tokens"),
    "mm_encoder_tp_mode": (1, "the engine places the vision encoder"),
    "enable_multimodal_encoder_data_parallel": (0, "the engine places the vision encoder"),
    "mm_encoder_attn_backend": (1, "attention_backend holds for the vision encoder, too"),
    "image_input_type": (1, "the model's own files say how images are read"),
    "image_token_id": (1, "the model's own files say how images are read"),
    "image_input_shape": (1, "the model's own files say how images are read"),
    "image_feature_size": (1, "the model's own files say how images are read"),
}

# Features that are not supported yet -> their arguments. None, False, 0 and empty values are accepted.
_FEATURES = {
    "a variant of LoRA adapters": "enable_lora_bias lora_dtype "
    "fully_sharded_loras default_mm_loras specialize_active_lora enable_tower_connector_lora "
    "long_lora_scaling_factors qlora_adapter_name_or_path enable_prompt_adapter prompt_adapters max_prompt_adapters "
    "max_prompt_adapter_token",
    "speculative decoding": "speculative_model_quantization "
    "speculative_draft_tensor_parallel_size speculative_max_model_len "
    "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min "
    "spec_decoding_acceptance_method "
    "typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha",
    "data parallelism": "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
    "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
    "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
    "dp_supervisor_probe_failure_threshold disable_nccl_for_dp_synchronization",
    "expert parallelism": "enable_eplb eplb_config num_redundant_experts eplb_window_size "
    "eplb_step_interval eplb_log_balancedness expert_placement_strategy all2all_backend enable_elastic_ep enable_dbo "
    "dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size enable_return_routed_experts",
    "an engine on several devices or nodes": ""
    "worker_use_ray engine_use_ray ray_workers_use_nsight device_ids cp_kv_cache_interleave_size "
    "dcp_kv_cache_interleave_size",
    "moving weights or KV caches to other memory": "kv_offloading_size kv_offloading_backend cpu_offload_params "
    "offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params kv_transfer_config "
    "ec_transfer_config weight_transfer_config enable_sleep_mode kv_sharing_fast_prefill",
    "images, audio and video": "enable_mm_embeds interleave_mm_strings media_io_kwargs image_processor "
    "image_processor_revision disable_image_processor mm_encoder_only video_pruning_rate disable_chunked_mm_input",
    "settings of recurrent layers": "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
    "mamba_cache_mode gdn_prefill_backend",
    "changes to a model's configuration": "hf_config_path disable_sliding_window "
    "override_attention_dtype tokenizer_revision",
    "a token as an argument": "hf_token",
    "configuration of reasoning": "reasoning_config",
    "configuration of poolers": "pooler_config override_pooler_config",
    "scales of KV caches but the checkpoint's": "calculate_kv_scales quantization_param_path",
    "other devices than CPUs and NVIDIA's GPUs": "override_neuron_config",
    "other names of template formats": "chat_template_text_format",
    "configuration of kernels": "attention_config kernel_config model_loader_extra_config additional_config "
    "allow_deprecated_quantization",
    "configuration of structured outputs": "structured_outputs_config guided_decoding_disable_any_whitespace",
    "prompts as embeddings": "enable_prompt_embeds",
    "custom code in the server": "logits_processors logits_processor_pattern worker_cls worker_extension_cls "
    "scheduler_cls io_processor_plugin tool_parser_plugin reasoning_parser_plugin middleware tool_server",
    "profiles and traces of the engine's parts": "profiler_config collect_detailed_traces cudagraph_metrics "
    "enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics kv_cache_metrics "
    "kv_cache_metrics_sample enable_per_request_metrics",
    "logging of answers, or by a configuration file": "enable_log_outputs log_config_file log_error_stack "
    "disable_access_log_for_endpoints",
    "the tokenizer's own routes": "enable_tokenizer_info_endpoint tokens_only",
    "TLS beyond key, certificate and authorities": "ssl_ciphers enable_ssl_refresh",
    "other limits of HTTP headers": "h11_max_incomplete_event_size h11_max_header_count",
    "other fingerprints": "fingerprint_mode fingerprint_value",
    "Cohere's routes": "cohere_is_reasoning_model cohere_format",
    "a gRPC server": "grpc",
    "scores of late interaction": "enable_flash_late_interaction",
    "a check of the environment": "fail_on_environ_validation",
}
# What to give in place of an argument that is not supported. Without an entry: nothing.
INSTEAD = {
    "hf_token": "set HF_TOKEN in the environment",
    "worker_use_ray": "give distributed_executor_backend ray",
    "engine_use_ray": "give distributed_executor_backend ray",
    "tokenizer_revision": "give tokenizer a folder that has it",
    "hf_config_path": "give hf_overrides the fields that differ",
    "pooler_config": "give embedding_pooling (cls, mean, last, max)",
    "override_pooler_config": "give embedding_pooling (cls, mean, last, max)",
    "structured_outputs_config": "leave it out: one backend handles all grammars, and reasoning_parser is a flag",
    "kv_transfer_config": "leave it out: a router in front sends prompts to the server that has their prefix",
    "kv_offloading_size": "leave it out: kv_cache_memory_bytes gives cached prefixes more room",
    "enable_sleep_mode": "stop the server while it has nothing to do: an LLMDeployment scales to zero",
    "logits_processors": "use logit_bias, bad_words or structured_outputs of requests",
    "logits_processor_pattern": "use logit_bias, bad_words or structured_outputs of requests",
    "middleware": "put a proxy in front of the server",
    "tool_parser_plugin": "leave it out: the chat template tells the format of tool calls",
    "reasoning_parser_plugin": "give reasoning_parser one of its names",
    "log_config_file": "give log_level and log_format",
    "disable_access_log_for_endpoints": "give disable_access_log",
    "chat_template_text_format": "leave it out: the template tells",
    "disable_sliding_window": "give max_model_len, at most the window",
    **{
        name: "give data_parallel_size"
        for name in _FEATURES["data parallelism"].split()
        if name.startswith("data_parallel_")
    },
    **dict.fromkeys(_FEATURES["speculative decoding"].split(), "say it in speculative_config"),
}
# Arguments that vLLM has had since the end of 2023 and has removed, or given another name.
_REMOVED = """
    chat_template_text_format cuda_graph_sizes device disable_async_output_proc disable_image_processor
    disable_log_requests disable_logprobs_during_spec_decoding disable_mm_preprocessor_cache enable_lora_bias
    enable_multimodal_encoder_data_parallel enable_prompt_adapter enable_reasoning engine_use_ray
    eplb_log_balancedness eplb_step_interval eplb_window_size guided_decoding_backend
    guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
    guided_decoding_disable_fallback image_feature_size image_input_shape image_input_type image_processor
    image_processor_revision image_token_id logits_processor_pattern long_lora_scaling_factors lora_extra_vocab_size
    max_context_len_to_capture max_paddings max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture
    multi_step_stream_outputs ngram_prompt_lookup_max ngram_prompt_lookup_min num_lookahead_slots
    num_redundant_experts num_scheduler_steps num_speculative_tokens override_neuron_config override_pooler_config
    preemption_mode prompt_adapters qlora_adapter_name_or_path quantization_param_path rope_scaling rope_theta
    scheduler_delay_factor spec_decoding_acceptance_method speculative_disable_by_batch_size
    speculative_disable_mqa_scorer speculative_draft_tensor_parallel_size speculative_max_model_len speculative_model
    speculative_model_quantization swap_space task tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type
    typical_acceptance_sampler_posterior_alpha typical_acceptance_sampler_posterior_threshold use_v2_block_manager
    worker_use_ray
"""
REMOVED = frozenset(_REMOVED.split())
NOT_SUPPORTED_YET = {name: feature for feature, names in _FEATURES.items() for name in names.split()}

_NAMES = {*ALWAYS, *ONLY, *NO_EFFECT, *NOT_SUPPORTED_YET}


def is_known(name: str) -> bool:
    """True if these tables have an argument of that name."""
    return name in _NAMES


def check(name: str, value: Any) -> None:
    """Check a value of an argument that `is_known`. Raises ConfigError, of one line with the reason; logs a warning for
    an argument without effect."""
    if value is None:
        return
    if name in ALWAYS:
        if not value and not name.startswith(("disable_", "skip_", "language_")):  # those are off in vLLM, too
            raise ConfigError(f"{name}={value!r} is not supported: {ALWAYS[name]}; drop it")
    elif name in ONLY:
        values, why = ONLY[name]
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise ConfigError(f"{name}={value!r} is not supported yet ({why}): give {allowed}, or drop it")
    elif name in NO_EFFECT:
        if value:
            logger.warning("%s=%r has no effect: %s", name, value, NO_EFFECT[name][1])
    elif value:
        raise ConfigError(not_supported_yet(name))


def not_supported_yet(name: str) -> str:
    """The error for an unsupported argument or flag. It does not repeat the value, which may be a secret."""
    argument = name.lstrip("-").replace("-", "_")
    return f"{name} is not supported yet ({NOT_SUPPORTED_YET[argument]}); {INSTEAD.get(argument, 'leave it out')}"


def did_you_mean(name: str, own_names: Iterable[str]) -> str:
    """``"; did you mean X?"``, where one of ``own_names`` or of vLLM's comes close, else nothing."""
    return suggestions.did_you_mean(name, [*own_names, *_NAMES])
