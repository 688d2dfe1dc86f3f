"""engine: how the model is served."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_operator import kubernetes_schemas as k8s
from octavo_operator.api.common import BY_NAME, SECRET_NAME
from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Engine:
    image: str | None = spec_field(
        "Image of the engine. Absent: the one that the operator is configured with at the time; later versions of "
        "the operator "
        "do not change it by themselves, any change of the spec does.",
        default=None,
        minLength=1,
        maxLength=512,
        pattern=r"^[^\s]+$",
    )
    image_pull_policy: str = spec_field(
        "When the image is pulled.", default="IfNotPresent", enum=["Always", "IfNotPresent", "Never"]
    )
    image_pull_secrets: tuple[str, ...] = spec_field(
        "Names of Secrets for pulling the image.",
        default=(),
        maxItems=8,
        items_schema={"type": "string", **SECRET_NAME},
    )
    dtype: str = spec_field(
        "What the model computes in.", default="auto", enum=["auto", "float32", "float16", "bfloat16"]
    )
    quantization: str | None = spec_field(
        "How weights are held in memory; absent: as the model comes.",
        default=None,
        maxLength=32,
        pattern="^[a-z0-9_-]+$",
    )
    max_model_len: int | str | None = spec_field(
        "Most tokens of a prompt and its answer together; auto: what the memory allows; absent: the model's own limit.",
        default=None,
        rules=(
            Rule(
                "type(self) == int ? self >= 1 : self == 'auto'",
                "engine.maxModelLen: a number of tokens of at least 1, or auto",
            ),
        ),
    )
    max_num_seqs: int | None = spec_field(
        "Most requests that are computed together.", default=None, minimum=1, maximum=65536
    )
    gpu_memory_utilization: int = spec_field(
        "Percent of a GPU's memory that the engine may use.", default=90, minimum=1, maximum=100
    )
    prefix_caching: bool = spec_field("Reuse what earlier prompts with the same beginning have computed.", default=True)
    args: tuple[str, ...] = spec_field(
        "Further arguments of `octavo serve`, after those that the other fields make.",
        default=(),
        maxItems=64,
        items_schema={"type": "string", "maxLength": 4096},
        rules=(
            Rule(
                "!self.exists(a, "
                "a.matches('^--(host|port|uds|management[-_]host|management[-_]port|api[-_]key|served[-_]model[-_]name|"
                "shutdown[-_]timeout)(=|$)'))",  # the engine reads both spellings
                "engine.args: --host, --port, --uds, --management-host, --management-port, --api-key, "
                "--served-model-name and "
                "--shutdown-timeout are set by the operator; use service, auth, model.name and lifecycle",
            ),
        ),
    )
    env: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Environment variables of the engine, and of the container that fetches the model.",
        default=(),
        maxItems=64,
        items_schema=k8s.ENV_VAR,
        **BY_NAME,
    )
