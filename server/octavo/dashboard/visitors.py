"""Limit the input of a page's visitors: flags to compare, models to read. Pure except for checks whether a path exists.

A dashboard on a foreign interface has visitors who are not the one that started it: they may compare flags that cost
time and memory, and name models of a hub; they name no file, no address and no process of this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from octavo.errors import ConfigError

# Where a server listens, who it answers and what it serves: the page that starts it says so, on any interface.
_FIXED = frozenset(
    {
        "host",
        "port",
        "uds",
        "root_path",
        "management_host",
        "management_port",
        "headless",
        "config",
        "model",
        "model_tag",
        "served_model_name",
        "api_key",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allow_credentials",
        "allow_runtime_lora_updating",
    }
)
_COMPARABLE = frozenset(
    {
        "async_scheduling",
        "attention_backend",
        "block_size",
        "data_parallel_size",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "dtype",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "max_num_seqs",
        "mm_encoder_cache_tokens",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "quantization",
        "scheduling_policy",
        "seed",
        "tensor_parallel_size",
    }
)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\w[\w.-]*)?", re.ASCII)


def check_flags(names: Iterable[str], local: bool) -> None:
    """Raise ConfigError for a flag of `octavo serve`, as max_num_seqs, that a visitor may not set. ``local``: the
    dashboard answers this machine alone, whose user may set all that the page itself does not."""
    for name in names:
        if name in _FIXED:
            raise ConfigError(f"{name} cannot be compared: the dashboard sets it for the servers that it starts")
        if not local and name not in _COMPARABLE:
            raise ConfigError(
                f"{name} cannot be compared on a dashboard that other machines reach; these can: "
                f"{', '.join(sorted(_COMPARABLE))}. Start it with --host 127.0.0.1 to compare any flag"
            )


def check_model(name: str, own: str, local: bool) -> None:
    """Raise ConfigError for a model that a visitor may not have read: a path or an address, unless it is ``own``, the
    one that the dashboard was started with."""
    name = name.strip()
    if local or not name or name == own:
        return
    if not _HUB_NAME.fullmatch(name) or ".." in name or os.path.lexists(name):
        raise ConfigError(
            f"Model must be the name of one on a hub, as org/name, got {name[:200]!r}: a dashboard that other machines "
            "reach reads no paths and addresses. Start it with --host 127.0.0.1 for those"
        )
