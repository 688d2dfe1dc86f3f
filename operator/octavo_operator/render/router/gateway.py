"""Envoy's configuration of a gateway: several pools behind one address, chosen by the model that a request names. Pure.

The Lua filter chooses the pool and names it in a header, which the one route follows: a request costs the same whatever
the number of models. Models are a file that the filter reads again when it changes, and clusters a file that Envoy
watches, so that a model which comes or goes leaves the listener, and every stream, alone. Tenants' API keys stay in
mounted Secrets, which neither the operator nor Envoy's configuration sees.

Envoy has filters for parts of this. api_key_auth takes keys only as text of the configuration, which is a ConfigMap.
json_to_metadata builds a tree of each body, and routes by its metadata are tried one after the other; the Lua filter
scans the body for the conversation's key in any case, and an engine refuses a model that it does not have.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from octavo_operator.diff import digest
from octavo_operator.render.router.envoy import (
    ADMIN,
    COUNTED,
    Pool,
    RouterSpec,
    adapter_headers,
    bootstrap,
    client_listener,
    cluster,
    key_lua,
    limits_of_tenants,
    lua_filter,
    to_a_replica,
)

Json = dict[str, Any]

MODEL_FILES = ("cds.yaml", "models.lua")  # what changes with the models; their form is the same in all versions
POOL_HEADER, TENANT_HEADER = "x-octavo-pool", "x-octavo-tenant"  # clients cannot set them
LIMITS_FILE = "tenants.json"
OLLAMA_VERSION = "0.12.6"  # as the engine says
_LOOKUPS = 200  # of DNS a second, of all pools together
_LIMIT = "type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit"
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"


@dataclass(frozen=True)
class Backend:
    """One of several pools that share a name. `served`: the name there; `weight`: its share beside the others'."""

    pool: str
    served: str
    weight: int


@dataclass(frozen=True)
class ModelName:
    """A name in requests. `pool`: who serves it; `served`: its name there; `owner`: the LLMDeployment; `created`:
    seconds since the epoch; `backends`: who shares it, then the others are those of the greatest weight; (): nobody;
    `parent`: of an adapter, the name of its model; `most_bytes`: of a request's body, None: as many as a router's."""

    name: str
    pool: str
    served: str
    owner: str
    created: int = 0
    backends: tuple[Backend, ...] = ()
    parent: str = ""
    most_bytes: int | None = None

    @property
    def pools(self) -> tuple[str, ...]:
        """All that may answer; those of weight 0 keep the streams that they have."""
        return tuple(one.pool for one in self.backends) or (self.pool,)


@dataclass(frozen=True)
class Tenant:
    """A holder of an API key. `key_file`: where it is mounted; `requests_per_minute`: of all routers together, None: no
    limit; `models`: names, None: all; `isolate_cache`: its prefix cache is its own; the others: as in the API, the
    picker's to keep."""

    name: str
    key_file: str
    requests_per_minute: int | None = None
    models: tuple[str, ...] | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    isolate_cache: bool = False


@dataclass(frozen=True)
class GatewaySpec:
    """A gateway. `replicas`: routers that share the tenants' budgets; `tls_directory`: where a Secret with tls.crt and
    tls.key is mounted, None: plain HTTP; without tenants requests are passed on as they are, keys included."""

    router: RouterSpec
    pools: tuple[Pool, ...]
    models: tuple[ModelName, ...]
    tenants: tuple[Tenant, ...] = ()
    replicas: int = 1
    tls_directory: str | None = None


def files(gateway: GatewaySpec) -> dict[str, str]:
    """All files of the configuration, by name."""
    spec, script = gateway.router, gateway_lua(gateway)
    made = {
        "envoy.yaml": _yaml(bootstrap(spec)),
        "lds.yaml": _yaml({"version_info": digest([spec.__dict__, script]), "resources": [listener(gateway)]}),
        "cds.yaml": _yaml({"resources": clusters(gateway)}),
        "key.lua": script,
        LIMITS_FILE: json.dumps(limits(gateway), indent=1) + "\n",
        "models.lua": "return " + _lua([_model(one) for one in gateway.models]) + "\n",
    }
    return {**made, "sds.yaml": _yaml({"resources": [certificate(gateway)]})} if gateway.tls_directory else made


def gateway_lua(gateway: GatewaySpec) -> str:
    """The Lua filter, with its settings: a router's, and the choice of the pool."""
    tenants = [
        {"name": one.name, "key_file": one.key_file, "isolated": one.isolate_cache}
        | ({} if one.models is None else {"models": dict.fromkeys(one.models, True)})
        for one in gateway.tenants
    ]
    settings = {
        "models": f"{gateway.router.directory}/models.lua",
        "tenants": tenants,
        "pool_header": POOL_HEADER,
        "ollama_version": OLLAMA_VERSION,
        "admin": ADMIN,
    }
    return f"{key_lua(gateway.router)}\nlocal SETTINGS = {_lua(settings)}\n{_script()}"


@functools.cache
def _script() -> str:
    return "".join(resources.files(__package__).joinpath(name).read_text() for name in ("split.lua", "gateway.lua"))


def _model(one: ModelName) -> Json:
    made = {**one.__dict__, "backends": [each.__dict__ for each in one.backends]}
    return {name: value for name, value in made.items() if value or name == "created"}  # most names have neither


def limits(gateway: GatewaySpec) -> Json:
    """Return the limits that the picker enforces; it reads this file again when it changes."""
    tenants = {
        one.name: {
            "tokensPerMinute": one.tokens_per_minute,
            "maxConcurrent": one.max_concurrent,
            "requestsPerMinute": one.requests_per_minute,
        }
        for one in gateway.tenants
    }
    return {"routers": gateway.replicas, "tenants": tenants}


def listener(gateway: GatewaySpec) -> Json:
    """The listener for clients: it changes with the tenants, not with the models."""
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster_header": POOL_HEADER, **to_a_replica()},
        "request_headers_to_remove": [POOL_HEADER],
        **adapter_headers(),
    }
    host: Json = {"name": "all", "domains": ["*"], "routes": [route], **COUNTED}
    if gateway.tenants:  # a tenant is a virtual cluster: its requests are counted by their status
        host["virtual_clusters"] = [
            {"name": one.name, "headers": [{"name": TENANT_HEADER, "string_match": {"exact": one.name}}]}
            for one in gateway.tenants
        ]
    before = _before_bodies(gateway)
    made = client_listener(gateway.router, gateway_lua(gateway), {"virtual_hosts": [host]}, before, (POOL_HEADER,))
    if gateway.tls_directory:
        made["filter_chains"][0]["transport_socket"] = _tls(gateway)
    return made


def _before_bodies(gateway: GatewaySpec) -> list[Json]:
    """The filters that know the tenant of a request and may refuse it, before its body is read."""
    if not gateway.tenants:
        return []
    script = f'DOOR = true; assert(loadfile("{gateway.router.directory}/key.lua"))()'
    found = [lua_filter({"inline_string": script})]
    if gateway.router.picker_port:
        found.append(limits_of_tenants())
    return [*found, _limit(gateway)] if any(one.requests_per_minute for one in gateway.tenants) else found


def _limit(gateway: GatewaySpec) -> Json:
    """A bucket a tenant in each router, of all of its requests a minute: the picker allows no more, and when it does
    not answer this is what is kept."""
    many = {"max_tokens": 2**31, "tokens_per_fill": 2**31, "fill_interval": "60s"}  # of those without a limit
    always = {"default_value": {"numerator": 100}}

    def bucket(most: int) -> Json:
        return {"max_tokens": most, "tokens_per_fill": most, "fill_interval": "60s"}

    return {
        "name": "envoy.filters.http.local_ratelimit",
        "typed_config": {
            "@type": _LIMIT,
            "stat_prefix": "tenants",
            "token_bucket": many,
            "filter_enabled": always,
            "filter_enforced": always,
            "response_headers_to_add": [{"header": {"key": "retry-after", "value": "10"}}],
            "rate_limits": [
                {"actions": [{"request_headers": {"header_name": TENANT_HEADER, "descriptor_key": "tenant"}}]}
            ],
            "descriptors": [
                {"entries": [{"key": "tenant", "value": one.name}], "token_bucket": bucket(one.requests_per_minute)}
                for one in gateway.tenants
                if one.requests_per_minute
            ],
        },
    }


def clusters(gateway: GatewaySpec) -> list[Json]:
    """A cluster a pool. Parts that are the same in all of them are the same objects, and so are written once."""
    seconds = math.ceil(len(gateway.pools) / _LOOKUPS)
    shared: dict[str, Any] = {}

    def share(value: Any) -> Any:
        return shared.setdefault(json.dumps(value), value) if isinstance(value, dict | list) else value

    made = []
    for pool in gateway.pools:
        one = cluster(gateway.router, pool)
        one["cluster_type"]["typed_config"]["dns_refresh_rate"] = f"{seconds}s"
        made.append({key: share(value) for key, value in one.items()})
    return made


def _tls(gateway: GatewaySpec) -> Json:
    source = {"path": f"{gateway.router.directory}/sds.yaml"}
    secret = {"name": "tls", "sds_config": {"resource_api_version": "V3", "path_config_source": source}}
    context = {"alpn_protocols": ["h2", "http/1.1"], "tls_certificate_sds_secret_configs": [secret]}
    kind = f"{_TLS}.DownstreamTlsContext"
    return {"name": "envoy.transport_sockets.tls", "typed_config": {"@type": kind, "common_tls_context": context}}


def certificate(gateway: GatewaySpec) -> Json:
    """The certificate and its key: files of a mounted Secret, read again when it changes."""
    folder = gateway.tls_directory
    return {
        "@type": f"{_TLS}.Secret",
        "name": "tls",
        "tls_certificate": {
            "certificate_chain": {"filename": f"{folder}/tls.crt"},
            "private_key": {"filename": f"{folder}/tls.key"},
            "watched_directory": {"path": folder},
        },
    }


def _lua(value: Any) -> str:
    """A value as Lua."""
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, str):
        plain = (chr(one) if 32 <= one < 127 and one not in b'"\\' else f"\\{one:03d}" for one in value.encode())
        return f'"{"".join(plain)}"'
    if isinstance(value, dict):
        return "{" + ",".join(f"[{_lua(key)}]={_lua(one)}" for key, one in value.items()) + "}"
    return "{" + ",\n".join(map(_lua, value)) + "}"


class _Quoted(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every string: what is bare for one reader of YAML is a boolean or a number for another (n, on, 1e3)."""


_Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _yaml(value: Json) -> str:
    """YAML with anchors for what repeats: a thousand clusters differ in their names alone."""
    return str(yaml.dump(value, Dumper=_Quoted, sort_keys=False, width=2**30, default_flow_style=True))
