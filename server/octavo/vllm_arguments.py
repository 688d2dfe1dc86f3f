"""vLLM's arguments that no field of ours stands for, by their Python names. `octavo serve` makes flags of them and
`octavo.LLM` takes them as keywords: both read these tables, so that what one accepts the other does too."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Any

from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

# Switches for what is always so: only turning them off is refused.
ALWAYS = {
    "enable_chunked_prefill": "long prompts are always cut into chunks",
    "enable_prompt_tokens_details": "usage always tells the cached tokens",
    "enable_request_id_headers": "X-Request-Id is always answered",
    "enable_server_load_tracking": "/load is always there",
    "disable_log_requests": "requests are logged only with --enable-log-requests",
    "no_enable_log_requests": "requests are logged only with --enable-log-requests",
    "async_scheduling": "steps are scheduled ahead wherever the device computes on its own",
}
# Arguments of which one value, or a few, is what happens anyway; another one is refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), "one, for now"),
    "pipeline_parallel_size": ((1,), "one, for now"),
    "data_parallel_size": ((1,), "one, for now"),
    "api_server_count": ((1,), "one, for now"),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json decides"),
    "config_format": (("auto", "hf"), "config.json decides"),
    "model_impl": (("auto", "vllm"), "the engine's own models"),
    "runner": (("auto", "generate", "pooling"), "every model gives answers and vectors"),
    "convert": (("auto", "none", "embed"), "every model gives answers and vectors"),
    "task": (("auto", "generate", "embed"), "every model gives answers and vectors"),
    "distributed_executor_backend": (("uni", "mp"), "one process computes"),
    "chat_template_content_format": (("auto", "string"), "texts of several parts are joined"),
    "guided_decoding_backend": (("auto", "guidance", "xgrammar", "outlines"), "one takes all kinds of grammars"),
    "logprobs_mode": (("raw_logprobs",), "before penalties and temperature"),
    "cpu_offload_gb": ((0,), "weights stay where they are"),
}
# Arguments without a meaning here, whatever their value: how many values a flag takes, and why. A line says so.
NO_EFFECT = {
    "trust_remote_code": (0, "code from model repositories never runs"),
    "swap_space": (1, "preempted requests are computed anew"),
    "compilation_config": (1, "nothing is compiled at the start"),
    "limit_mm_per_prompt": (1, "models take text only"),
    "max_log_len": (1, "prompts are never logged"),
    "max_seq_len_to_capture": (1, "steps of all lengths are recorded"),
    "num_lookahead_slots": (1, "there is no speculation"),
    "code_revision": (1, "code from model repositories never runs"),
    "disable_custom_all_reduce": (0, "one process computes"),
    "disable_async_output_proc": (0, "results are taken in while the next step runs"),
    "use_v2_block_manager": (0, "there is one block manager"),
}
# What would change the answers or how they are made, and is not built. Off (None, False, 0, empty) is what is so.
NOT_SUPPORTED_YET = frozenset({
    "additional_config", "allowed_local_media_path", "allowed_media_domains", "attention_config",
    "calculate_kv_scales", "collect_detailed_traces", "data_parallel_address", "data_parallel_backend",
    "data_parallel_rank", "data_parallel_rpc_port", "data_parallel_size_local", "data_parallel_start_rank",
    "decode_context_parallel_size", "disable_sliding_window", "enable_dbo", "enable_eplb", "enable_expert_parallel",
    "enable_lora", "enable_lora_bias", "enable_mm_embeds", "enable_prompt_adapter", "enable_prompt_embeds",
    "enable_sleep_mode", "fully_sharded_loras", "hf_config_path", "hf_overrides", "hf_token", "ignore_patterns",
    "io_processor_plugin", "kv_events_config", "kv_offloading_size", "kv_transfer_config", "logits_processors",
    "lora_dtype", "lora_extra_vocab_size", "lora_modules", "mamba_cache_dtype", "max_cpu_loras", "max_lora_rank",
    "max_loras", "mm_processor_kwargs", "model_loader_extra_config", "nnodes", "node_rank", "num_scheduler_steps",
    "optimization_level", "override_attention_dtype", "override_pooler_config", "pooler_config",
    "prefix_caching_hash_algo", "reasoning_config", "rope_scaling", "rope_theta", "scheduler_cls",
    "speculative_config", "structured_outputs_config", "tokenizer_revision", "worker_cls", "worker_extension_cls",
})  # fmt: skip

_INSTEAD = {"hf_token": "set HF_TOKEN in the environment instead"}

_NAMES = {*ALWAYS, *ONLY, *NO_EFFECT, *NOT_SUPPORTED_YET}


def is_known(name: str) -> bool:
    """Whether vLLM has an argument of that name and these tables tell what becomes of it."""
    return name in _NAMES


def check(name: str, value: Any) -> None:
    """Whether ``value`` may be given for ``name`` (`is_known`). Raises ConfigError, of one line with the reason."""
    if value is None:
        return
    if name in ALWAYS:
        if not value:
            raise ConfigError(f"{name}={value!r} is not supported: {ALWAYS[name]}; drop it")
    elif name in ONLY:
        values, why = ONLY[name]
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise ConfigError(f"{name}={value!r} is not supported ({why}): give {allowed}, or drop it")
    elif name in NO_EFFECT:
        if value:
            logger.warning("%s=%r has no effect: %s", name, value, NO_EFFECT[name][1])
    elif value:
        raise ConfigError(not_supported_yet(name))


def not_supported_yet(name: str) -> str:
    """The value is not repeated: it may be a secret."""
    return f"{name} is not supported yet: {_INSTEAD.get(name, 'drop it')}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean X?"``, where one of ``names`` or of vLLM's comes close, else nothing."""
    close = difflib.get_close_matches(name, sorted({*names, *_NAMES}), n=1)
    return f"; did you mean {close[0]}?" if close else ""
