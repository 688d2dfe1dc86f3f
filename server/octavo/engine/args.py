"""Engine arguments (flags of `octavo serve`, keyword arguments of `LLM`), resolved against the model's files into an
`EngineConfig`. No torch: the API process does this."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.engine.context_length import FITTING_LENGTHS, context_length
from octavo.engine.kv_events.config import parse_kv_events_config
from octavo.engine.recurrent_models import check_recurrent
from octavo.engine.spec_decode.check import check_draft, prediction_layers
from octavo.engine.spec_decode.config import parse_speculative_config
from octavo.engine.spec_decode.heads import draft_head
from octavo.errors import ConfigError, ModelError
from octavo.executor.ray_placement import check_ray
from octavo.fetch.description import stored_dtype
from octavo.fetch.model_config import load_generation_config, load_hf_config
from octavo.fetch.pooler_config import load_pooler_config, max_sequence_length
from octavo.fetch.sources import resolve_model
from octavo.fetch.tied_head import follow_tied_head
from octavo.interface.engine_config import (
    HEAD_METHODS,
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from octavo.interface.model_config import parse_config
from octavo.interface.model_files import ModelFiles
from octavo.interface.quantizations import GPU_ONLINE, ONLINE, QUANTIZATIONS
from octavo.interface.ranks import deal

DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # aliases
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8", "fp8_e4m3")
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}  # alias: torch's name
ATTENTION_BACKENDS = ("auto", "reference", "cpu", "triton")
MAX_RANKS = 48
MAX_LOCK_STEP = 16  # engines that tell each other before each step how many rows they have
BACKENDS = ("mp", "ray", "uni")
MAX_LORA_RANK = 512
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass
class EngineArgs:
    """Engine arguments, with vLLM's names and meanings."""

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    # A number, or at most the model's own and what fits the memory: None, as vLLM's "auto" and -1.
    max_model_len: int | str | None = None
    seed: int = 0
    device: str = "auto"
    block_size: int = 16
    enable_prefix_caching: bool = True
    prefix_retention_share: float = 0.5
    prefix_retention_max: int = 3600
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    disable_hybrid_kv_cache_manager: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    generation_config: str = "auto"  # auto: the model's generation_config.json; vllm: none
    enforce_eager: bool = False
    attention_backend: str = "auto"
    skip_tokenizer_init: bool = False
    language_model_only: bool = False  # leave out what reads images
    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)  # {"image": how many at most}
    mm_processor_kwargs: dict[str, Any] | None = None  # settings of the image processor, over its files' own
    mm_encoder_cache_tokens: int | None = None  # embeddings of images that are kept; None: see `with_images`
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_timeout_seconds: int = 300
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    distributed_executor_backend: str | None = None
    disable_custom_all_reduce: bool = False
    hf_overrides: dict[str, Any] | None = None  # fields of config.json to be read with these values
    rope_scaling: dict[str, Any] | None = None  # in config.json's place, as older versions of vLLM name it
    rope_theta: float | None = None  # and its base
    kv_events_config: dict[str, Any] | None = None  # see `KVEventsConfig`
    speculative_config: dict[str, Any] | None = None  # see `SpeculativeConfig`
    speculative_model: str | None = None  # the draft model of such a configuration, as older versions of vLLM name it
    num_speculative_tokens: int | None = None  # and its number of tokens
    enable_lora: bool = False
    max_loras: int | None = None  # see `LoRAConfig`, whose defaults hold
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None  # None: as max_loras

    @classmethod
    def field_names(cls) -> set[str]:
        """The names of all arguments."""
        return {f.name for f in fields(cls)}

    def create_engine_config(self, progress: bool = True) -> EngineConfig:
        """Find the model's files and resolve every default. Raises ConfigError or ModelError."""
        self._validate()
        files = resolve_model(
            self.model,
            revision=self.revision,
            download_dir=self.download_dir,
            tokenizer=self.tokenizer,
            progress=progress,
            need_weights=self.load_format != "dummy",
            any_architecture="architectures" in (self.hf_overrides or {}),
        )
        return self.engine_config(files)

    def engine_config(self, files: ModelFiles) -> EngineConfig:
        """`create_engine_config` of files that have been found."""
        if self.load_format == "dummy" and files.format == "safetensors":
            files = replace(files, weights=())  # not even their headers are looked at
        hf_config = follow_tied_head(files, load_hf_config(files, self.hf_overrides, self._rope()))
        max_model_len = context_length(self.max_model_len, parse_config(hf_config, files.model))
        if self.max_model_len in FITTING_LENGTHS:
            max_model_len = min(max_model_len, max_sequence_length(files) or max_model_len)
        max_num_seqs = self.max_num_seqs or 128
        budget = self.max_num_batched_tokens or 0
        if 0 < budget < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({max_num_seqs}), or running "
                "sequences could not all decode in one step; raise the first or lower the second"
            )
        model = ModelConfig(
            model=files.model,
            files=files,
            hf_config=hf_config,
            dtype=self._dtype(files, hf_config),
            max_model_len=max_model_len,
            quantization=self.quantization,
            seed=self.seed,
            generation_config=load_generation_config(files) if self.generation_config == "auto" else {},
            dtype_is_asked=self.dtype != "auto",
            pooler=load_pooler_config(files, hf_config),
            language_model_only=self.language_model_only,
            max_images=_max_images(self.limit_mm_per_prompt),
            mm_processor_kwargs=self.mm_processor_kwargs,
        )
        cache = CacheConfig(
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching and not model.is_encoder,
            prefix_retention_share=self.prefix_retention_share,
            prefix_retention_max=self.prefix_retention_max,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_dtype=_FP8.get(self.kv_cache_dtype, self.kv_cache_dtype),
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
        )
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            max_model_len=max_model_len,
            mm_encoder_cache_tokens=self.mm_encoder_cache_tokens,
        )
        config = EngineConfig(
            model=model,
            cache=cache,
            scheduler=scheduler,
            device=self.device,
            load_format=self.load_format,
            enforce_eager=self.enforce_eager,
            attention_backend=self.attention_backend,
            skip_tokenizer_init=self.skip_tokenizer_init,
            fit_max_model_len=self.max_model_len in FITTING_LENGTHS,
            kv_events=parse_kv_events_config(self.kv_events_config),
            speculative=self._speculative(model),
            parallel=self._parallel(model),
            lora=self._lora(model),
        )
        check_recurrent(config)
        return config

    def _rope(self) -> dict[str, Any]:
        """Return the parameters of rotary embeddings that arguments state."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return {**(self.rope_scaling or {}), **theta}

    def _lora(self, model: ModelConfig) -> LoRAConfig | None:
        if not self.enable_lora:
            return None
        if model.is_encoder:
            raise ConfigError(
                f"enable_lora: {model.model} generates no text, and adapters of encoders are not supported"
            )
        method = self._parse_speculative().method
        if method in ("mtp", *HEAD_METHODS):
            raise ConfigError(f"enable_lora with speculation by {method} is not supported yet: leave one of them out")
        if self.nnodes > 1:
            raise ConfigError("enable_lora on several nodes is not supported yet: give nnodes 1, or leave it out")
        slots, default = self.max_loras or 1, LoRAConfig()
        in_memory = self.max_cpu_loras or slots
        if in_memory < slots:
            raise ConfigError(f"max_cpu_loras ({in_memory}) must be at least max_loras ({slots})")
        return LoRAConfig(slots, self.max_lora_rank or default.max_lora_rank, in_memory)

    def _parallel(self, model: ModelConfig) -> ParallelConfig:
        heads, ranks = model.num_heads, self.tensor_parallel_size
        if heads % ranks:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise ConfigError(
                f"tensor_parallel_size {ranks} does not divide the {heads} attention heads of {model.model}: give one "
                f"of {sizes}"
            )
        stages = self.pipeline_parallel_size
        if stages > 1 and model.is_encoder:
            raise ConfigError(
                f"pipeline_parallel_size {stages}: {model.model} is an encoder, which runs as a whole; give 1"
            )
        if stages > model.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size {stages} is more than the {model.num_layers} layers of {model.model}: give at "
                f"most {model.num_layers}"
            )
        if self.enable_expert_parallel:
            self._check_experts(model)
        return ParallelConfig(
            ranks,
            self.distributed_timeout_seconds,
            self.data_parallel_size,
            self.nnodes,
            self.node_rank,
            self.master_addr,
            self.master_port,
            stages,
            self.distributed_executor_backend,
            self.enable_expert_parallel,
            self.disable_custom_all_reduce,
        )

    def _check_experts(self, model: ModelConfig) -> None:
        count = model.num_experts
        if not count:
            raise ConfigError(f"enable_expert_parallel: {model.model} has no experts; leave it out")
        deal(count, 0, self.tensor_parallel_size * self.data_parallel_size)

    def _speculative(self, model: ModelConfig) -> SpeculativeConfig:
        config = self._parse_speculative()
        if config.is_on and model.is_encoder:
            raise ConfigError(f"speculative_config: {model.model} generates no text; leave it out")
        if config.method == "mtp":
            layers = prediction_layers(model, config.num_speculative_tokens)
            count = config.num_speculative_tokens or layers.num_layers
            config = replace(config, draft=layers, num_speculative_tokens=count)
        if config.num_speculative_tokens >= model.max_model_len:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens {config.num_speculative_tokens} must be below "
                f"max_model_len ({model.max_model_len})"
            )
        if config.method == "mtp":
            return config
        return replace(config, draft=self._draft(config, model)) if config.model is not None else config

    def _parse_speculative(self) -> SpeculativeConfig:
        model, count = self.speculative_model, self.num_speculative_tokens
        if model is None and count is None:
            return parse_speculative_config(self.speculative_config)
        if self.speculative_config is not None:
            name = "speculative_model" if model is not None else "num_speculative_tokens"
            raise ConfigError(f"{name} is part of speculative_config, which is given too: say all of it there")
        if model is None:
            raise ConfigError("num_speculative_tokens needs a speculative_model, or a method in speculative_config")
        return parse_speculative_config({"method": "draft_model", "model": model, "num_speculative_tokens": count})

    def _draft(self, config: SpeculativeConfig, target: ModelConfig) -> ModelConfig:
        """The draft model beside ``target``. Raises ModelError, and ConfigError where it does not fit."""
        if config.method in HEAD_METHODS:
            return self._draft_head(config, target)
        args = EngineArgs(
            model=config.model,
            revision=config.revision,
            download_dir=self.download_dir,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=config.quantization or self._draft_quantization,
            seed=self.seed,
            device=self.device,
            language_model_only=True,
        )
        draft = args.create_engine_config().model
        check_draft(draft, target, self.skip_tokenizer_init)
        return replace(draft, max_model_len=min(draft.max_model_len, target.max_model_len))

    def _draft_head(self, config: SpeculativeConfig, target: ModelConfig) -> ModelConfig:
        """The head that guesses for ``target``. Raises ModelError, and ConfigError where it does not fit."""
        files = resolve_model(
            config.model,
            revision=config.revision,
            download_dir=self.download_dir,
            need_weights=self.load_format != "dummy",
            any_architecture=True,
        )
        return draft_head(config, files, target, config.quantization or self._draft_quantization)

    @property
    def _draft_quantization(self) -> str | None:
        """The quantization of a draft model that names none; formats of one checkpoint do not carry over."""
        return self.quantization if self.quantization in (*ONLINE, *GPU_ONLINE) else None

    def _dtype(self, files: ModelFiles, hf_config: dict[str, Any]) -> str:
        if self.dtype != "auto":
            return DTYPE_NAMES.get(self.dtype, self.dtype)
        stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
        if stored is None and files.format == "safetensors":  # gpt-oss' file does not say it
            with suppress(ModelError):  # whoever reads the weights says what is wrong with them
                stored = stored_dtype(files)
            if stored is None and hf_config.get("quantization_config"):
                stored = "bfloat16"  # of weights that are not here
        name = str(stored).removeprefix("torch.")
        return name if name in DTYPES[1:] else "float32"

    def _validate_ranks(self) -> None:
        if self.distributed_executor_backend not in (None, *BACKENDS):
            raise ConfigError(
                f"distributed_executor_backend must be one of {', '.join(BACKENDS)}, got "
                f"{self.distributed_executor_backend!r}"
            )
        if self.tensor_parallel_size > MAX_RANKS:
            raise ConfigError(f"tensor_parallel_size must be at most {MAX_RANKS}, got {self.tensor_parallel_size}")
        if (ranks := self.tensor_parallel_size * self.pipeline_parallel_size) > MAX_RANKS:
            raise ConfigError(
                f"pipeline_parallel_size {self.pipeline_parallel_size}: an engine has at most {MAX_RANKS} ranks, not "
                f"{ranks}"
            )
        if self.distributed_executor_backend == "uni" and ranks > 1:
            raise ConfigError(f"distributed_executor_backend uni is one process, and there are {ranks} ranks: give mp")
        if self.distributed_executor_backend == "ray":
            self._validate_ray()
        speculative = self._parse_speculative()
        if self.pipeline_parallel_size > 1 and speculative.in_worker:
            raise ConfigError(
                f"speculative_config: method {speculative.method} does not work with pipeline_parallel_size "
                f"{self.pipeline_parallel_size} yet: give method ngram or suffix, or pipeline_parallel_size 1"
            )

    def _validate_shared_experts(self) -> None:
        """Refuse what engines with shared experts do not support."""
        cores, speculative = self.data_parallel_size, self._parse_speculative()
        together = f"enable_expert_parallel with data_parallel_size {cores}"
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{together} and {name} {size} is not supported yet: give {name} 1, or data_parallel_size 1"
                )
        if cores > MAX_LOCK_STEP:
            raise ConfigError(f"{together}: at most {MAX_LOCK_STEP} engines step together, give no more")
        if self.enable_lora:
            raise ConfigError(f"{together} and enable_lora is not supported yet: leave one of them out")
        if self.distributed_executor_backend == "mp":
            raise ConfigError(f"{together} does not go with distributed_executor_backend mp: leave that out")
        if speculative.in_worker:
            raise ConfigError(
                f"{together} and speculation by {speculative.method} is not supported yet: give method ngram or "
                "suffix, or leave one of them out"
            )

    def _validate_ray(self) -> None:
        check_ray()
        if self.tensor_parallel_size == 1:
            raise ConfigError(
                "distributed_executor_backend ray places the ranks of tensor_parallel_size, and that is 1: leave it out"
            )
        for name, only in (("node_rank", 0), ("data_parallel_size", 1), ("pipeline_parallel_size", 1)):
            if getattr(self, name) != only:
                raise ConfigError(
                    f"{name} {getattr(self, name)} does not go with distributed_executor_backend ray: give {only}"
                )

    def _validate_nodes(self, at_least: Callable[[str, int], None]) -> None:
        at_least("nnodes", 1)
        at_least("node_rank", 0)
        at_least("master_port", 1)
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be below nnodes ({self.nnodes}), got {self.node_rank}")
        if self.master_port > 65535:
            raise ConfigError(f"master_port must be at most 65535, got {self.master_port}")
        ranks, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if self.nnodes > 1 and stages not in (1, self.nnodes):
            raise ConfigError(
                f"pipeline_parallel_size {stages} on {self.nnodes} nodes is not supported yet: each node has a stage, "
                f"give {self.nnodes}, or 1 and tensor_parallel_size over all nodes"
            )
        if ranks * stages % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size {ranks} on {self.nnodes} nodes: each has as many ranks, give {self.nnodes} or a "
                "multiple of it"
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError("data_parallel_size above 1 on several nodes is not supported yet: give 1")

    def _validate_adapters(self, at_least: Callable[[str, int], None]) -> None:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            at_least(name, 1)
            if getattr(self, name) is not None and not self.enable_lora:
                raise ConfigError(f"{name} needs enable_lora: give both, or neither")
        if self.max_lora_rank is not None and self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_LORA_RANK}, got {self.max_lora_rank}")
        if self.enable_lora and self.pipeline_parallel_size > 1:
            raise ConfigError("enable_lora with pipeline_parallel_size above 1 is not supported yet: give 1")
        if self.enable_lora and self.distributed_executor_backend == "ray":
            raise ConfigError(
                "enable_lora with distributed_executor_backend ray is not supported yet: leave one of them out"
            )

    def _validate_overrides(self) -> None:
        for name in ("hf_overrides", "rope_scaling"):
            if not isinstance(given := getattr(self, name), dict | None):
                raise ConfigError(f"{name} must be an object of config.json's fields, got {given!r}")
        if self.rope_theta is not None and not self.rope_theta > 0:
            raise ConfigError(f"rope_theta must be above 0, got {self.rope_theta}")

    def _validate(self) -> None:
        def at_least(name: str, low: int) -> None:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{name} must be an integer >= {low}, got {value!r}")

        def one_of(name: str, known: tuple[str, ...]) -> None:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

        one_of("dtype", (*DTYPES, *DTYPE_NAMES))
        one_of("load_format", LOAD_FORMATS)
        if self.quantization is not None:
            one_of("quantization", QUANTIZATIONS)
        one_of("kv_cache_dtype", KV_CACHE_DTYPES)
        one_of("scheduling_policy", ("fcfs", "priority"))
        one_of("generation_config", ("auto", "vllm"))
        one_of("device", ("auto", "cpu", "cuda"))
        one_of("attention_backend", ATTENTION_BACKENDS)
        at_least("block_size", 1)
        at_least("tensor_parallel_size", 1)
        at_least("pipeline_parallel_size", 1)
        at_least("data_parallel_size", 1)
        if self.data_parallel_size > MAX_RANKS:
            raise ConfigError(f"data_parallel_size must be at most {MAX_RANKS}, got {self.data_parallel_size}")
        if self.data_parallel_size > 1 and self.kv_events_config:
            raise ConfigError(
                f"kv_events_config works with one core only, and data_parallel_size is {self.data_parallel_size}: "
                "leave one of them out"
            )
        self._validate_ranks()
        if self.enable_expert_parallel and self.data_parallel_size > 1:
            self._validate_shared_experts()
        at_least("distributed_timeout_seconds", 1)
        self._validate_adapters(at_least)
        self._validate_nodes(at_least)
        at_least("max_num_seqs", 1)
        at_least("max_num_batched_tokens", 1)
        at_least("long_prefill_token_threshold", 0)
        at_least("num_gpu_blocks_override", 1)
        at_least("kv_cache_memory_bytes", 1)
        at_least("mm_encoder_cache_tokens", 1)
        self._validate_overrides()
        parse_kv_events_config(self.kv_events_config)
        self._parse_speculative()
        if isinstance(self.max_model_len, str) and self.max_model_len != "auto":
            raise ConfigError(f'max_model_len must be a number or "auto", got {self.max_model_len!r}')
        at_least("prefix_retention_max", 0)
        if not 0 <= self.prefix_retention_share <= 1:
            raise ConfigError(f"prefix_retention_share must be from 0 to 1, got {self.prefix_retention_share}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )


def _max_images(limits: dict[str, Any]) -> int | None:
    """Return the limit on images in ``limit_mm_per_prompt``, None if it has none. Raises ConfigError."""
    for kind, count in limits.items():
        if kind not in ("image", "video", "audio"):
            raise ConfigError(f'limit_mm_per_prompt must be as {{"image": 4}}, got the kind {kind!r}')
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"limit_mm_per_prompt must have whole numbers from 0, got {count!r} for {kind}")
        if kind != "image" and count:
            raise ConfigError(f"limit_mm_per_prompt has {kind}, which no model reads here; leave it out, or give 0")
    return limits.get("image")
