"""Configuration of one engine: plain frozen dataclasses, resolved, as they travel to the core process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from octavo.interface.architectures import ENCODERS, IMAGE_READERS, M_ROPE
from octavo.interface.model_config import parse_config
from octavo.interface.model_config.text import TextConfig
from octavo.interface.model_files import ModelFiles
from octavo.interface.pooling import PoolerConfig
from octavo.interface.ranks import Stage

Family = TypeVar("Family", bound=TextConfig)


@dataclass(frozen=True)
class ModelConfig:
    """A model as its files describe it. ``text`` is what config.json says, checked and with its family's defaults;
    ``hf_config`` is config.json itself, for what is read in one place: images, quantization, labels."""

    model: str
    files: ModelFiles
    hf_config: dict[str, Any]
    dtype: str  # of activations: float32 | float16 | bfloat16
    max_model_len: int
    quantization: str | None = None
    seed: int = 0
    generation_config: dict[str, Any] = field(default_factory=dict)
    dtype_is_asked: bool = True  # by --dtype; False: it is the checkpoint's own
    weight_dtype: str | None = None  # of weights, where it is not that of activations
    pooler: PoolerConfig = field(default_factory=PoolerConfig)
    language_model_only: bool = False  # leave out what reads images
    max_images: int | None = None  # in a prompt; None: as many as fit
    mm_processor_kwargs: dict[str, Any] | None = None  # settings of the image processor, over its files' own

    @property
    def architecture(self) -> str:
        """The first of config.json's "architectures"."""
        return str((self.hf_config.get("architectures") or [""])[0])

    @property
    def is_encoder(self) -> bool:
        """True if it reads whole texts, keeps nothing of them and writes none."""
        return self.architecture in ENCODERS

    @property
    def is_recurrent(self) -> bool:
        """True if some layers keep a state of a sequence instead of keys and values."""
        return self.text.num_recurrent_layers > 0

    @property
    def reads_images(self) -> bool:
        """True if prompts may have images."""
        has_tower = isinstance(self.hf_config.get("vision_config"), dict) and self.files.format != "gguf"
        wanted = not self.language_model_only and self.max_images != 0
        return has_tower and wanted and self.architecture in IMAGE_READERS

    @property
    def has_mrope(self) -> bool:
        """True if tokens of images have three positions."""
        return self.reads_images and self.architecture in M_ROPE

    @property
    def is_all_float32(self) -> bool:
        """True if weights and activations are in float32, unless weights have a form of their own."""
        plain = self.dtype_is_asked or self.files.format != "gguf"
        return self.dtype == "float32" and self.weight_dtype is None and plain

    @property
    def num_labels(self) -> int:
        """Classes of a classification head."""
        return len(self.pooler.labels)

    @cached_property
    def text(self) -> TextConfig:
        """The language model's fields. Raises ModelError."""
        return parse_config(self.hf_config, self.model)

    def text_of(self, family: type[Family]) -> Family:
        """`text`, which has the fields of ``family``."""
        assert isinstance(self.text, family), f"{self.architecture} is none of {family.__name__}"
        return self.text

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.text.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.text.num_hidden_layers

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.text.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.text.num_kv_heads

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has some; 0: no layer has."""
        return self.text.expert_count

    @property
    def head_size(self) -> int:
        """Width of one head, see `TextConfig`."""
        return self.text.head_size

    @property
    def head_sizes(self) -> set[int]:
        """Widths of a head in all layers."""
        return {self.head_size} | {own["head_dim"] for own in self.text.own_fields if "head_dim" in own}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of dataclasses.asdict, also after JSON."""
        files, pooler = ModelFiles.from_dict(data["files"]), PoolerConfig.from_dict(data["pooler"])
        return cls(**{**data, "files": files, "pooler": pooler})

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration as it is for layer number ``layer``, where layers differ (Gemma 4)."""
        own = self.text.own_fields[layer] if self.text.own_fields else {}
        return replace(self, hf_config={**self.hf_config, **own}) if own else self


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = 16  # tokens per block
    enable_prefix_caching: bool = True
    prefix_retention_share: float = 0.5  # of the blocks, at most, that are kept longer because clients want that
    prefix_retention_max: int = 3600  # seconds that clients may want
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | int8 | float8_e4m3fn
    kv_cache_memory_bytes: int | None = None  # of the whole pool; None: decided by the device's memory
    num_gpu_blocks_override: int | None = None  # exactly that many usable blocks
    disable_hybrid_kv_cache_manager: bool = False  # let layers with a window keep every position


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and the order of requests."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048  # 0: what suits the device, decided by the worker
    long_prefill_token_threshold: int = 0  # tokens of one prompt per step; 0: no limit
    policy: str = "fcfs"  # fcfs | priority
    max_model_len: int = 2048
    mm_encoder_cache_tokens: int | None = None  # embeddings of images that are kept; None: decided by the worker


def num_sampled_rows(max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Most tokens that a step samples after. Where all sequences that may run do, that leaves none for drafts: a step
    is then so large that each further token costs its full time."""
    return max(max_num_seqs, num_speculative_tokens + 1)


@dataclass(frozen=True)
class KVEventsConfig:
    """Events of the prefix cache: where to publish them; endpoints are ZeroMQ's: tcp://HOST:PORT or ipc://PATH."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"  # null: nothing is published
    endpoint: str = "tcp://127.0.0.1:5557"  # of the PUB socket; vLLM's default is tcp://*:5557
    replay_endpoint: str | None = None  # of the ROUTER socket that sends batches again; None: there is none
    buffer_steps: int = 10_000  # batches that can be sent again
    hwm: int = 10_000  # batches that wait for a slow subscriber before it loses some; vLLM's default is 100,000
    max_queue_size: int = 10_000  # batches that wait to be sent; vLLM's default is 100,000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """True if anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


HEAD_METHODS = ("eagle", "eagle3", "medusa")  # of speculation: with draft heads that were trained for the model
WORKER_METHODS = ("draft_model", "mtp", *HEAD_METHODS)  # of speculation: a model guesses, where the steps run


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: how tokens are guessed; vLLM's names and, but for ``method``, its defaults."""

    # none | ngram: what followed the last tokens where they stood before | suffix: there and in recent answers |
    # draft_model: what a smaller model says | mtp: what the checkpoint's own layer for that says |
    # eagle, eagle3: what a draft head says that was trained for the model | medusa: what such heads say, one a token |
    # auto: as `DEFAULT_ON_CPU` says, once the device is known
    method: str = "none"
    num_speculative_tokens: int = 0  # guessed in one step
    prompt_lookup_max: int = 5  # the longest and the shortest end that is looked for
    prompt_lookup_min: int = 5
    suffix_decoding_max_tree_depth: int = 24  # tokens of a match that count
    suffix_decoding_max_cached_requests: int = 10_000  # recent answers that are kept; 0: only the sequence's own text
    suffix_decoding_max_spec_factor: float = 1.0  # tokens guessed for each that matches
    suffix_decoding_min_token_prob: float = 0.1  # of a whole guess, by counts
    model: str | None = None  # that guesses, whatever --model takes; its revision and quantization
    revision: str | None = None
    quantization: str | None = None
    draft_tensor_parallel_size: int = 1
    draft: ModelConfig | None = None  # ``model``, once it is found

    @property
    def is_on(self) -> bool:
        """True if there are guesses."""
        return self.method not in ("none", "auto")

    @property
    def in_worker(self) -> bool:
        """True if a model makes them, where the steps run."""
        return self.method in WORKER_METHODS


# Where speculation is not configured. Off until it is shown never to cost (`make bench WHAT=speculation`); then it is
# SpeculativeConfig("ngram", 7, 4, 2).
DEFAULT_ON_CPU = SpeculativeConfig("none")


@dataclass(frozen=True)
class ParallelConfig:
    """Processes that compute a model together; vLLM's names."""

    tensor_parallel_size: int = 1  # ranks that hold a part of each layer, or of each of a stage's
    distributed_timeout_seconds: int = 300  # for a step, after which the ranks that are late are named and all end

    data_parallel_size: int = 1  # cores of one server, each with the whole model
    nnodes: int = 1  # machines, each with as many of the ranks, in their order
    node_rank: int = 0
    master_addr: str = "127.0.0.1"  # of node 0, where it listens for the others
    master_port: int = 29501
    pipeline_parallel_size: int = 1  # stages that have a part of the layers each, one after the other
    distributed_executor_backend: str | None = None  # mp: also a single rank has a process of its own
    enable_expert_parallel: bool = False  # each rank has some experts whole, instead of a part of every one
    disable_custom_all_reduce: bool = False  # on GPUs: exchange through NCCL alone

    @property
    def world_size(self) -> int:
        """Ranks that compute one engine's steps: those of the first stage, then those of the second one, ..."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def first_of_last_stage(self) -> int:
        """The rank whose samples count."""
        return self.world_size - self.tensor_parallel_size

    def place_of(self, rank: int) -> tuple[Stage, int]:
        """The stage of a rank, and its number among those of the stage."""
        number, within = divmod(rank, self.tensor_parallel_size)
        return Stage(number, self.pipeline_parallel_size), within

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nnodes

    @property
    def num_processes(self) -> int:
        """Processes that share the machine."""
        return self.ranks_per_node * self.data_parallel_size


@dataclass(frozen=True)
class LoRAConfig:
    """Limits on LoRA adapters beside a model; vLLM's names and defaults."""

    max_loras: int = 1  # in one step
    max_lora_rank: int = 16
    max_cpu_loras: int = 1  # in memory


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the core process needs to know."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str = "cpu"  # cpu | cuda
    load_format: str = "auto"
    enforce_eager: bool = False
    attention_backend: str = "auto"  # of octavo_kernels: auto | reference | cpu | triton
    skip_tokenizer_init: bool = False
    fit_max_model_len: bool = False  # lower max_model_len to what the KV cache can hold
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig | None = None  # None: no adapters

    @property
    def drafter(self) -> EngineConfig | None:
        """The configuration of the model that guesses tokens, as of an engine of its own; None: there is none."""
        draft = self.speculative.draft
        if draft is None:
            return None
        return replace(self, model=draft, speculative=SpeculativeConfig(), parallel=ParallelConfig(), lora=None)

    @property
    def takes_images(self) -> bool:
        """True if requests may have images here."""
        return self.model.reads_images and not self.skip_tokenizer_init

    def with_max_model_len(self, max_model_len: int) -> EngineConfig:
        """The same for sequences of up to ``max_model_len`` tokens."""
        model, speculative = replace(self.model, max_model_len=max_model_len), self.speculative
        if speculative.draft is not None:
            shortest = min(max_model_len, speculative.draft.max_model_len)
            speculative = replace(speculative, draft=replace(speculative.draft, max_model_len=shortest))
        scheduler = replace(self.scheduler, max_model_len=max_model_len)
        return replace(self, model=model, scheduler=scheduler, speculative=speculative)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_dict`."""
        speculative = dict(data["speculative"])
        if speculative["draft"] is not None:
            speculative["draft"] = ModelConfig.from_dict(speculative["draft"])
        return cls(
            **{
                **data,
                "model": ModelConfig.from_dict(data["model"]),
                "cache": CacheConfig(**data["cache"]),
                "scheduler": SchedulerConfig(**data["scheduler"]),
                "kv_events": KVEventsConfig(**data["kv_events"]),
                "speculative": SpeculativeConfig(**speculative),
                "parallel": ParallelConfig(**data["parallel"]),
                "lora": LoRAConfig(**data["lora"]) if data["lora"] is not None else None,
            }
        )
