"""The containers of the pods: engine and fetch."""

from __future__ import annotations

import json
import math
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.api.engine import Speculative
from octavo_operator.api.multimodal import Multimodal
from octavo_operator.diff import quantity
from octavo_operator.render import names
from octavo_operator.render.lora import adapter_arguments, adapter_mounts
from octavo_operator.render.responses import response_arguments, response_environment, response_mounts

Json = dict[str, Any]
_TOKENS = {"ngram": 7, "draft_model": 4, "eagle": 3, "eagle3": 3, "medusa": 3}  # guessed in one step, by method


def model_argument(deployment: LLMDeployment) -> str:
    """The model argument of `octavo serve` and `octavo fetch`."""
    model = deployment.spec.model
    _, _, rest = model.uri.partition("://")
    if model.source == "pvc":
        _, _, path = rest.partition("/")
        return _escape(f"{names.MODEL_PATH}/{path}".rstrip("/"))
    if model.source == "oci":
        _, _, path = rest.partition("//")
        return _escape(f"{names.MODEL_PATH}/{path}".rstrip("/"))
    return _escape(rest if model.source == "file" else model.uri)


def arguments(deployment: LLMDeployment) -> list[str]:
    """Arguments of `octavo serve`."""
    spec = deployment.spec
    engine = spec.engine
    out = [
        model_argument(deployment),
        "--host",
        "0.0.0.0",
        "--port",
        str(names.API_PORT),
        "--management-port",
        str(names.MANAGEMENT_PORT),
        "--served-model-name",
        *(_escape(name) for name in deployment.served_names),
        "--shutdown-timeout",
        str(spec.lifecycle.drain_seconds),
        "--device",
        "cuda" if spec.accelerator else "cpu",  # explicit, whatever devices the node has
    ]
    for flag, value, default in (
        ("--revision", spec.model.revision, None),
        ("--dtype", engine.dtype, "auto"),
        ("--quantization", engine.quantization, None),
        ("--max-model-len", engine.max_model_len, None),
        ("--max-num-seqs", engine.max_num_seqs, None),
        ("--tensor-parallel-size", spec.parallelism.tensor, 1),
        ("--pipeline-parallel-size", spec.parallelism.pipeline, 1),
        ("--data-parallel-size", spec.parallelism.data, 1),
        ("--gpu-memory-utilization", f"{engine.gpu_memory_utilization / 100:g}", "0.9"),
        ("--speculative-config", _speculative(engine.speculative), None),
        ("--chat-template", _chat_template(deployment), None),
    ):
        if value != default:
            out += [flag, str(value)]
    if spec.parallelism.expert:
        out.append("--enable-expert-parallel")
    if not engine.prefix_caching:
        out.append("--no-enable-prefix-caching")
    out += [*_multimodal(engine.multimodal or Multimodal()), *response_arguments(deployment)]
    return [*out, *adapter_arguments(deployment), *engine.args]


def _escape(text: str) -> str:
    """Escapes $: in arguments the kubelet expands $(NAME), and $$ to $. engine.args is not escaped, so that users can
    refer to variables."""
    return text.replace("$", "$$")


def _speculative(speculative: Speculative | None) -> str | None:
    """vLLM's JSON; where it has no default of its own, what suits most texts."""
    if speculative is None:
        return None
    config: Json = {"method": speculative.method}
    if speculative.model is not None:
        config["model"] = speculative.model
    tokens = speculative.tokens or _TOKENS.get(speculative.method)
    if tokens is not None:
        config["num_speculative_tokens"] = tokens
    if speculative.method == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return _escape(json.dumps(config))


def _multimodal(multimodal: Multimodal) -> list[str]:
    out: list[str] = []
    if (images := multimodal.limit_per_prompt.image) is not None:
        out += ["--limit-mm-per-prompt", json.dumps({"image": images})]
    if multimodal.encoder_cache_tokens is not None:
        out += ["--mm-encoder-cache-tokens", str(multimodal.encoder_cache_tokens)]
    if multimodal.processor_options:
        out += ["--mm-processor-kwargs", _escape(json.dumps(multimodal.processor_options))]
    if multimodal.allowed_media_domains:
        out += ["--allowed-media-domains", *multimodal.allowed_media_domains]
    if multimodal.allowed_local_media_path is not None:
        out += ["--allowed-local-media-path", multimodal.allowed_local_media_path]
    return out


def _chat_template(deployment: LLMDeployment) -> str | None:
    template = deployment.spec.model.chat_template
    if template is None:
        return None
    if template.inline is not None:
        return _escape(template.inline)
    return "$(OCTAVO_CHAT_TEMPLATE)"


def expected_engine(deployment: LLMDeployment, image: str) -> Json:
    """The container `engine`, which runs `octavo serve`."""
    spec = deployment.spec
    probes = spec.probes
    return {
        "name": names.ENGINE,
        "image": image,
        "imagePullPolicy": spec.engine.image_pull_policy,
        "command": ["octavo", "serve"],
        "args": arguments(deployment),
        "env": _environment(deployment, engine=True),
        **_env_from(deployment),
        "ports": [
            {"name": "http", "containerPort": names.API_PORT, "protocol": "TCP"},
            {"name": "management", "containerPort": names.MANAGEMENT_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(deployment),
        "volumeMounts": [*_mounts(deployment), *response_mounts(deployment), *adapter_mounts(deployment)],
        # Ready means that the model is loaded. Until then the liveness probe does not run, however long loading takes.
        "startupProbe": {
            **_get("/readyz"),
            "periodSeconds": probes.startup.period_seconds,
            "failureThreshold": math.ceil(probes.startup.budget_seconds / probes.startup.period_seconds),
            "timeoutSeconds": 2,
        },
        "readinessProbe": {
            **_get("/readyz"),
            "periodSeconds": probes.readiness.period_seconds,
            "failureThreshold": probes.readiness.failure_threshold,
            "timeoutSeconds": probes.readiness.timeout_seconds,
        },
        "livenessProbe": {
            **_get("/livez"),
            "periodSeconds": probes.liveness.period_seconds,
            "failureThreshold": probes.liveness.failure_threshold,
            "timeoutSeconds": probes.liveness.timeout_seconds,
        },
        # While preStop sleeps the pod serves, and endpoints are updated; only then SIGTERM starts the drain.
        **(
            {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}}
            if (seconds := spec.lifecycle.pre_stop_seconds)
            else {}
        ),
        "securityContext": _security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def expected_fetch(deployment: LLMDeployment, image: str) -> Json | None:
    """The init container `fetch`: downloads the model into the cache unless it is there. None: nothing is fetched.

    A container of its own, so that a failed download is not mistaken for a failure of the engine.
    """
    model = deployment.spec.model
    if not model.is_fetched:
        return None
    revision = ["--revision", model.revision] if model.revision else []
    limit = model.cache.node.max_size if model.cache.node else None
    bounded = ["--max-cache-size", f"{quantity(str(limit)):.0f}"] if limit is not None else []
    return {
        "name": names.FETCH,
        "image": image,
        "imagePullPolicy": deployment.spec.engine.image_pull_policy,
        "command": ["octavo", "fetch"],
        "args": [model_argument(deployment), *revision, *bounded, "--quiet"],
        "env": _environment(deployment, engine=False),
        **_env_from(deployment),
        "resources": _fetch_resources(deployment),
        "volumeMounts": [mount for mount in _mounts(deployment) if mount["name"] != "shm"],
        "securityContext": _security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _get(path: str) -> Json:
    return {"httpGet": {"path": path, "port": "management", "scheme": "HTTP"}}


def _security_context() -> Json:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _resources(deployment: LLMDeployment) -> Json:
    out: Json = {
        "requests": {key: str(value) for key, value in deployment.spec.resources.requests.items()},
        "limits": {key: str(value) for key, value in deployment.spec.resources.limits.items()},
    }
    if accelerator := deployment.spec.accelerator:
        for part in out.values():
            part[accelerator.resource] = str(accelerator.count)
    return {name: part for name, part in out.items() if part}


_FETCH_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
_FETCH_MEMORY = "1Gi"  # it streams to disk, whatever the size of the model


def _fetch_resources(deployment: LLMDeployment) -> Json:
    """The engine's resources without devices: it runs before the engine, so the pod needs no more, and is Guaranteed
    when the engine is. Where the spec has none, what fetching takes, for namespaces with a quota."""
    given = deployment.spec.resources
    requests = {name: str(value) for name, value in given.requests.items() if "/" not in name}
    limits = {name: str(value) for name, value in given.limits.items() if "/" not in name}
    for name, value in _FETCH_REQUESTS.items():
        if name not in limits:  # a limit without a request is the request, too
            requests.setdefault(name, value)
    if "memory" not in limits:
        limits["memory"] = max(_FETCH_MEMORY, requests["memory"], key=quantity)
    return {"requests": requests, "limits": limits} if requests else {"limits": limits}


def _env_from(deployment: LLMDeployment) -> Json:
    return {"envFrom": [dict(source) for source in sources]} if (sources := deployment.spec.env_from) else {}


def _environment(deployment: LLMDeployment, engine: bool) -> list[Json]:
    spec = deployment.spec
    out: list[Json] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "XDG_CACHE_HOME", "value": names.CACHE_PATH},
        {"name": "OCTAVO_CACHE", "value": f"{names.CACHE_PATH}/octavo"},
        {"name": "HF_HOME", "value": f"{names.CACHE_PATH}/huggingface"},
        {"name": "TRITON_CACHE_DIR", "value": f"{names.CACHE_PATH}/triton"},
    ]
    if not (engine and spec.accelerator):
        # The image requests all GPUs, and NVIDIA's runtime would give them to any container without this.
        out.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    if secret := spec.model.credentials_secret_ref:
        # Two variables: the hub's token must not be sent to other servers.
        variable = "OCTAVO_HTTP_TOKEN" if spec.model.source == "https" else "HF_TOKEN"
        out.append(_from_key(variable, "secretKeyRef", secret.name, secret.key))
    if engine:
        field = {"apiVersion": "v1", "fieldPath": "status.podIP"}  # with API_PORT it is what routers know the pod by
        out.append({"name": "OCTAVO_REPLICA_ADDRESS", "valueFrom": {"fieldRef": field}})
    if engine and spec.auth:
        ref = spec.auth.api_key_secret_ref
        out.append(_from_key("OCTAVO_API_KEY", "secretKeyRef", ref.name, ref.key))
    if engine and spec.model.chat_template and (config := spec.model.chat_template.config_map_ref):
        out.append(_from_key("OCTAVO_CHAT_TEMPLATE", "configMapKeyRef", config.name, config.key))
    if engine:
        out += response_environment(deployment)
    own = {variable["name"] for variable in spec.engine.env}
    return [variable for variable in out if variable["name"] not in own] + [
        dict(variable) for variable in spec.engine.env
    ]


def _from_key(variable: str, kind: str, name: str, key: str) -> Json:
    return {"name": variable, "valueFrom": {kind: {"name": name, "key": key}}}


def _mounts(deployment: LLMDeployment) -> list[Json]:
    # A folder of a node has a subfolder for each namespace, made by the kubelet, which follows no symbolic links out.
    folder = {"subPath": deployment.namespace} if deployment.spec.model.cache.node else {}
    out: list[Json] = [
        {"name": "cache", "mountPath": names.CACHE_PATH, **folder},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if deployment.spec.model.source in ("pvc", "oci"):
        out.append({"name": "model", "mountPath": names.MODEL_PATH, "readOnly": True})
    return out + [dict(mount) for mount in deployment.spec.volume_mounts]
