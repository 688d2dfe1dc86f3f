"""Find what an LLMGateway serves: names of models, their owners, and the settings of Envoy's configuration. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo_operator.api import LLMDeployment
from octavo_operator.api.gateway import LLMGateway, Split, Tenant
from octavo_operator.api.network import Hold
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names
from octavo_operator.render.router import gateway as envoy
from octavo_operator.render.router.body_limits import most_bytes
from octavo_operator.render.router.envoy import Endpoint, Pool, RouterSpec
from octavo_operator.render.router.gateway import Backend, GatewaySpec, ModelName
from octavo_operator.render.router.objects import PICKER_GRPC_PORT, router_spec

HOLD = Hold()  # of every gateway
TLS_PATH, TENANTS_PATH = "/etc/octavo-tls", "/etc/octavo-tenants"  # where Secrets are mounted


@dataclass(frozen=True)
class Candidate:
    """An LLMDeployment that the gateway selects. `created`: seconds since the epoch."""

    deployment: LLMDeployment
    created: int


@dataclass(frozen=True)
class Served:
    """`models`: by the order of their LLMDeployments' ages. `conflicts`: names that somebody does not get, a sentence
    each."""

    models: tuple[ModelName, ...]
    conflicts: tuple[str, ...]


def served_models(gateway: LLMGateway, candidates: Iterable[Candidate]) -> Served:
    """Every name of every LLMDeployment, then the aliases. If two have one name, the older one gets it, so that a new
    model takes nothing from one that serves, unless spec.splits shares the name."""
    by_age = sorted(candidates, key=lambda each: (each.created, each.deployment.name))
    by_name = {one.deployment.name: one for one in by_age}
    models: dict[str, ModelName] = {}
    conflicts: list[str] = []
    shared = {it.name: it for split in gateway.spec.splits if (it := _shared(split, by_name, conflicts))}
    for one in by_age:
        owner = one.deployment.name
        for name, parent in _names_of(one.deployment):
            change = "rename that adapter" if parent else "change its spec.model.name or aliases"
            if name in shared:
                if owner not in (backend.pool for backend in shared[name].backends):
                    conflicts.append(
                        f"model {name!r} of LLMDeployment {owner} is shared by others; add it to the backends of "
                        f"spec.splits, or {change}"
                    )
            elif name in models:
                conflicts.append(
                    f"model {name!r} of LLMDeployment {owner} is served by {models[name].owner}, which is older; "
                    f"{change}, or let spec.splits share the name"
                )
            else:
                models[name] = ModelName(
                    name, owner, name, owner, one.created, parent=parent, most_bytes=most_bytes(one.deployment)
                )
    models |= shared
    for alias in gateway.spec.aliases:
        if alias.name in models:
            conflicts.append(f"alias {alias.name!r} is the name of a model of {models[alias.name].owner}; remove it")
        elif (target := models.get(alias.model)) is None:
            conflicts.append(f"alias {alias.name!r}: no LLMDeployment serves {alias.model!r}")
        else:
            models[alias.name] = dataclasses.replace(target, name=alias.name)
    return Served(tuple(models.values()), tuple(conflicts))


def _names_of(deployment: LLMDeployment) -> list[tuple[str, str]]:
    """All names of an LLMDeployment; those of its adapters with the model's own."""
    own = deployment.served_names
    return [(name, "") for name in own] + [(one.name, own[0]) for one in deployment.spec.adapters or ()]


def _shared(split: Split, candidates: Mapping[str, Candidate], conflicts: list[str]) -> ModelName | None:
    """None: no LLMDeployment of it is there."""
    found = []
    for one in split.backends:
        if candidate := candidates.get(one.llmdeployment):
            names_there = candidate.deployment.served_names
            served = split.name if split.name in names_there else names_there[0]
            found.append((Backend(one.llmdeployment, served, one.weight), candidate))
        else:
            conflicts.append(f"model {split.name!r}: the gateway selects no LLMDeployment {one.llmdeployment}")
    if not found:
        return None
    most = max((backend for backend, _ in found), key=lambda backend: backend.weight)
    created = min(candidate.created for _, candidate in found)
    backends = tuple(backend for backend, _ in found)
    sizes = [most_bytes(candidate.deployment) for _, candidate in found]
    known = [size for size in sizes if size is not None]
    largest = max(known) if len(known) == len(sizes) else None
    return ModelName(split.name, most.pool, most.served, most.pool, created, backends, most_bytes=largest)


def gateway_spec(gateway: LLMGateway, candidates: Iterable[Candidate], config: OperatorConfig) -> GatewaySpec:
    """The settings of Envoy's configuration."""
    models = served_models(gateway, candidates).models
    owners = dict.fromkeys(pool for one in models for pool in one.pools)
    return GatewaySpec(
        router=envoy_settings(gateway),
        pools=tuple(_pool(owner, gateway.namespace, config) for owner in owners),
        models=models,
        tenants=tuple(map(_tenant, gateway.spec.tenants)),
        replicas=gateway.spec.replicas,
        tls_directory=TLS_PATH if gateway.spec.tls else None,
    )


def envoy_settings(gateway: LLMGateway) -> RouterSpec:
    """Return the settings of a gateway's routers. All of them have a picker, so that neither a model at zero nor a
    limit replaces a router."""
    spec = router_spec(gateway.spec.routing)
    return dataclasses.replace(spec, picker_port=PICKER_GRPC_PORT, hold_seconds=HOLD.max_seconds)


def _pool(name: str, namespace: str, config: OperatorConfig) -> Pool:
    service = f"{names.pods_service(name)}.{namespace}.svc.{config.cluster_domain}."
    return Pool(name, (Endpoint(service, names.API_PORT, names.MANAGEMENT_PORT),))


def _tenant(tenant: Tenant) -> envoy.Tenant:
    path = f"{TENANTS_PATH}/{tenant.name}/{tenant.api_key_secret_ref.key}"
    return envoy.Tenant(
        tenant.name,
        path,
        tenant.requests_per_minute,
        tenant.models,
        tenant.tokens_per_minute,
        tenant.max_concurrent,
        tenant.isolate_cache,
    )
