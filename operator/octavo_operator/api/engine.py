# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""engine: image and settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api import kubernetes_schemas as k8s
from octavo_operator.api.common import BY_NAME, SECRET_NAME
from octavo_operator.api.multimodal import Multimodal
from octavo_operator.api.schema import Rule, spec_field

PINNED, FOLLOW = "Pinned", "Follow"  # values of imagePolicy


@dataclass(frozen=True, kw_only=True)
class Speculative:
    """`spec.engine.speculative`: tokens that are guessed and verified several at a time."""

    RULES: ClassVar = (
        Rule(
            "has(self.model) == (self.method in ['draft_model', 'eagle', 'eagle3', 'medusa'])",
            "engine.speculative.model is for methods draft_model, eagle, eagle3 and medusa, which need it",
        ),
        Rule(
            "self.method != 'none' || !has(self.tokens)",
            "engine.speculative.tokens has no meaning with method none; leave it out",
        ),
    )
    method: str = spec_field(
        (
            "Drafting method. none: off. ngram: continue as the text did after the same tokens earlier; for "
            "summaries, edits and answers from documents. suffix: also as recent answers did. draft_model: a "
            "smaller model with the same tokenizer. mtp: the model's own draft layer (DeepSeek V3, GLM-4.5, Qwen3.5). "
            "eagle, eagle3, medusa: draft heads trained for the model."
        ),
        enum=["none", "ngram", "suffix", "draft_model", "mtp", "eagle", "eagle3", "medusa"],
    )
    model: str | None = spec_field(
        "The model of method draft_model, or the draft heads of eagle, eagle3 and medusa, as model.uri names one "
        "that the engine fetches.",
        default=None,
        minLength=1,
        maxLength=1024,
    )
    tokens: int | None = spec_field(
        "Maximum number of tokens guessed in one step; the engine guesses fewer where that is faster. Default: 7 "
        "of ngram, 24 of suffix, 4 of draft_model, 1 of mtp, 3 of the others.",
        default=None,
        minimum=1,
        maximum=64,
    )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`spec.engine`: image and settings of the engine."""

    RULES: ClassVar = (
        Rule(
            "!has(self.image) || !has(self.imagePolicy) || self.imagePolicy == 'Pinned'",
            "engine.imagePolicy Follow is for the operator's image; leave engine.image out",
        ),
    )
    image: str | None = spec_field(
        "Image of the engine. Default: the operator's engine image, see imagePolicy.",
        default=None,
        minLength=1,
        maxLength=512,
        pattern=r"^[^\s]+$",
    )
    image_policy: str | None = spec_field(
        "Reaction to a new engine image of the operator. Pinned: the pods keep theirs until the spec changes. "
        "Follow: the operator rolls the new image out, a limited number of LLMDeployments at a time, the next one when "
        "an earlier one is ready. Default: the operator's setting.",
        default=None,
        enum=[PINNED, FOLLOW],
    )
    image_priority: int = spec_field(
        "Order of rollouts with imagePolicy Follow: higher first (canaries), then by age.",
        default=0,
        minimum=-1000,
        maximum=1000,
    )
    image_pull_policy: str = spec_field(
        "Pull policy of the image.", default="IfNotPresent", enum=["Always", "IfNotPresent", "Never"]
    )
    image_pull_secrets: tuple[str, ...] = spec_field(
        "Names of Secrets for pulling the image.",
        default=(),
        maxItems=8,
        items_schema={"type": "string", **SECRET_NAME},
    )
    dtype: str = spec_field(
        "Data type of weights and activations.", default="auto", enum=["auto", "float32", "float16", "bfloat16"]
    )
    quantization: str | None = spec_field(
        "Quantization method of the weights. Default: the checkpoint's own.",
        default=None,
        maxLength=32,
        pattern="^[a-z0-9_-]+$",
    )
    max_model_len: int | str | None = spec_field(
        "Maximum number of tokens per sequence, prompt and answer together; a number that does not fit into memory is "
        "refused. Default: auto, the model's own limit or, if that is more than fits, what fits.",
        default=None,
        rules=(
            Rule(
                "type(self) == int ? self >= 1 : self == 'auto'",
                "engine.maxModelLen: a number of tokens of at least 1, or auto",
            ),
        ),
    )
    max_num_seqs: int | None = spec_field(
        "Maximum number of sequences per step.", default=None, minimum=1, maximum=65536
    )
    gpu_memory_utilization: int = spec_field(
        "Percentage of the memory that the engine may use: of the GPU's or, without one, of the container's limit.",
        default=90,
        rules=(
            Rule(
                "self >= 10 && self <= 100",
                "engine.gpuMemoryUtilization is a percentage from 10 to 100: write 90 for vLLM's 0.9, and 100 for 1",
            ),
        ),
    )
    prefix_caching: bool = spec_field("Enable automatic prefix caching.", default=True)
    speculative: Speculative | None = spec_field(
        "Speculative decoding, which changes no token. Default: the engine's own.", default=None
    )
    multimodal: Multimodal | None = spec_field(
        "Images in prompts, of models that read them. Default: the engine's own.", default=None
    )
    args: tuple[str, ...] = spec_field(
        "Additional arguments of `octavo serve`, after those from the other fields.",
        default=(),
        maxItems=64,
        items_schema={"type": "string", "maxLength": 4096},
        rules=(
            Rule(
                "!self.exists(a, "
                "a.matches('^--(host|port|uds|management[-_]host|management[-_]port|api[-_]key|served[-_]model[-_]name|"
                "shutdown[-_]timeout|device)(=|$)'))",  # the engine reads both spellings
                "engine.args: --host, --port, --uds, --management-host, --management-port, --api-key, "
                "--served-model-name, --shutdown-timeout and --device are set by the operator; use service, auth, "
                "model.name, lifecycle and accelerator",
            ),
            Rule(
                "!self.exists(a, a.matches('^--?[A-Za-z][-_A-Za-z0-9]*[ \\t\\n]'))",
                'engine.args: a flag and its value in one string; write two items, or one with "=": --max-num-seqs=8',
            ),
        ),
    )
    env: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Environment variables of the engine, and of the container that fetches the model.",
        default=(),
        maxItems=64,
        items_schema=k8s.ENV_VAR,
        rules=(
            Rule(
                "!self.exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES')",
                "engine.env: NVIDIA_VISIBLE_DEVICES is set by the operator and the device plugin; use accelerator",
            ),
        ),
        **BY_NAME,
    )
