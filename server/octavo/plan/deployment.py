"""An LLMDeployment with which the operator runs what was planned."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.fetch.model_names import ALIASES, hub_address, looks_local
from octavo.fetch.object_store import SCHEMES
from octavo.memory.dry_run import Plan
from octavo.memory.ledger import GIB, MIB

# Fields of EngineArgs that are fields of the kind, or that the operator sets.
_OWN = {
    "model",
    "revision",
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "device",
    "tokenizer",
    "download_dir",
    "load_format",
}
# Fields of ServerArgs that the operator sets, or that are a Secret's.
_OF_OPERATOR = ("host", "port", "uds", "management_host", "management_port", "api_key", "shutdown_timeout")
HOST_BYTES = 4 * GIB  # beside a GPU: libraries, and what passes through on its way there


def deployment(plan: Plan, args: EngineArgs, cpus: int, server: Any = None) -> dict[str, Any]:
    """The manifest. ``server``: options of the HTTP server. Raises ConfigError for what a cluster cannot be given."""
    if plan.ledger is None:
        raise ConfigError(f"there is no LLMDeployment of what does not fit: {plan.problem}")
    if plan.num_devices > 1:
        raise ConfigError(
            f"--yaml writes what one device holds, and this needs {plan.num_devices}: print it for one, then set "
            "spec.parallelism, and accelerator.count on GPUs"
        )
    config = plan.config
    engine: dict[str, Any] = {
        "maxModelLen": config.scheduler.max_model_len,
        "maxNumSeqs": config.scheduler.max_num_seqs,
    }
    if args.dtype != "auto":
        engine["dtype"] = {"half": "float16", "float": "float32"}.get(args.dtype, args.dtype)
    if args.quantization is not None:
        engine["quantization"] = args.quantization
    if not args.enable_prefix_caching:
        engine["prefixCaching"] = False
    flags = _flags(args, _OWN)
    if server is not None:
        flags += _flags(server, {*_OF_OPERATOR, "served_model_name"})
    percent = args.gpu_memory_utilization * 100
    if abs(percent - round(percent)) < 1e-9 and percent >= 10:
        engine["gpuMemoryUtilization"] = round(percent)
    else:
        flags.append(f"--gpu-memory-utilization={args.gpu_memory_utilization:g}")
    if flags:
        engine["args"] = flags
    spec: dict[str, Any] = {"model": _model(args), "engine": engine}
    if server is not None and server.served_model_name:
        spec["model"]["name"] = server.served_model_name[0]
    if plan.device.kind == "cpu":
        memory = _quantity(plan.device.total)
        spec["resources"] = {"requests": {"cpu": str(cpus), "memory": memory}, "limits": {"memory": memory}}
    else:
        spec["accelerator"] = {"count": 1}
        host = _quantity(-(-(HOST_BYTES + plan.memory.weights // 4) // GIB) * GIB)
        spec["resources"] = {"requests": {"cpu": str(min(cpus, 4)), "memory": host}, "limits": {"memory": host}}
    name = _name(args.model or "")
    return {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": spec}


def as_yaml(value: Any, indent: int = 0) -> str:
    """YAML of what JSON can hold; texts are quoted as JSON does."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"{' ' * indent}{key}:\n{as_yaml(inner, indent + 2)}")
        else:
            plain = isinstance(inner, str) and re.fullmatch(r"[A-Za-z][\w./-]*", inner) is not None
            plain = plain and str(inner).lower() not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
            lines.append(f"{' ' * indent}{key}: {inner if plain else json.dumps(inner)}")
    return "\n".join(lines)


def _model(args: EngineArgs) -> dict[str, Any]:
    from octavo.fetch.model_names import DEFAULT_MODEL

    name = args.model or DEFAULT_MODEL
    found: dict[str, Any] = {}
    if name in ALIASES or name.startswith(("https://", "http://", "pypi://", *SCHEMES)):
        address, revision = hub_address(name)
        found["uri"] = address
    elif looks_local(name):
        found["uri"] = f"file://{Path(name).expanduser().absolute()}"
        revision = None
    else:
        address, revision = hub_address(name)
        found["uri"] = address if address.startswith("hf://") else f"hf://{address}"
    if args.revision or revision:
        found["revision"] = args.revision or revision
    return found


def _flags(args: Any, skip: Collection[str]) -> list[str]:
    """The other arguments, as flags."""
    found, unset = [], type(args)()
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name in skip or value == getattr(unset, field.name):
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            found.append(f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return found


def left_out(server: Any) -> list[str]:
    """Flags of the HTTP server that were given and are the operator's."""
    unset = type(server)()
    found = [name for name in _OF_OPERATOR if getattr(server, name) != getattr(unset, name)]
    return ["--" + name.replace("_", "-") for name in found]


def _name(model: str) -> str:
    last = model.rstrip("/").removesuffix("/config.json").rpartition("/")[2] or "octavo"
    name = re.sub(r"[^a-z0-9]+", "-", last.lower().removesuffix(".gguf").removesuffix(".json")).strip("-")
    return name[:50].strip("-") if re.match(r"[a-z]", name) else f"model-{name}"[:50].strip("-")


def _quantity(nbytes: int) -> str:
    for unit, size in (("Gi", GIB), ("Mi", MIB)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)
