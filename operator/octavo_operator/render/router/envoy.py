"""Envoy's configuration of a router: affinity by a Lua filter's key, a ring hash with bounded load, health checks and
retries; with a picker, the replica that it names, and the ring hash without its answer. Pure.

Envoy reads its listeners and clusters from files and watches their directory, so a change needs no restart, and the
data path needs neither the operator nor the API server.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from octavo_operator.diff import digest
from octavo_operator.render.router.replies import MAX_BODY_BYTES, local_replies

Json = dict[str, Any]

KEY_HEADER = "x-octavo-key"
PICK_SPACE, PICK = "envoy.lb", "x-gateway-destination-endpoint"  # metadata of requests: "ADDRESS:PORT,..." in order
RETRIES, RETRIED = "octavo-retries", "octavo-retried"  # there, too: how often, and after which status
LIMITS = "limits"  # a constant that the picker is told by the filter which asks for a tenant
MISSING = "x-octavo-missing-adapter"  # of an engine's 404: another replica may have the adapter by now
CALLER_HEADERS = ("x-octavo-tenant", "x-octavo-tenant-id", "x-octavo-cache-salt")  # a gateway's alone
# Of hashes alone, unless told otherwise. Found with benchmarks/routing: 125 leaves one of four replicas with 1.3 times
# the mean of a run's requests, 110 with 1.2 times, and as many prefixes are found.
LOAD_FACTOR = 110
_HEALTH_SECONDS = 1
_BODIES = 0.27  # of a router's memory, for bodies of requests: on their way to the picker there are two copies of each
_HEAP = 0.85  # of it, for Envoy's heap: Lua's is beside it
_LEAST_HEAP = 2**26  # bytes: with less it would take no requests at all
_MANY = 2**20  # of requests at once: the engines' own queues are what bounds the load
# Paths to what one replica keeps.
_KEPT = r"/v1/(responses/resp_|conversations/conv_|files/file-|batches/batch_)[^/]+(/.*)?"
_LISTS = r"/v1/(files|batches)/?"
ADMIN, _PICKER = "_admin", "_picker"  # clusters of the router itself: no pool can have these names
_FILTER, _EXTENSION = "envoy.filters.http", "type.googleapis.com/envoy.extensions.filters.http"
_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_DNS = "envoy.extensions.clusters.dns.v3.DnsCluster"
_UPSTREAM = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@dataclass(frozen=True)
class Endpoint:
    """The address of replicas, or a DNS name of all of them."""

    address: str
    port: int = 8000
    health_port: int = 8001


@dataclass(frozen=True)
class Pool:
    """Replicas that serve the same. `name`: in Envoy's metrics."""

    name: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True)
class RouterSpec:
    """Settings of a router. `load_factor`: percent of the mean load that one replica may have, None: the picker's own
    default, and LOAD_FACTOR without it; `key_bytes`: of a completion's prompt; `directory`: of the configuration;
    `picker_port`: on loopback, 0: there is no picker; `hold_seconds`: for so long the picker may hold requests of a
    pool without replicas; `body_seconds`: until a request has to be here; `most_bytes`: of a body, for the engine;
    `memory_bytes`: Envoy's limit; `workers`: its threads."""

    session_headers: tuple[str, ...] = ("x-session-id",)
    load_factor: int | None = None
    key_bytes: int = 2048
    address: str = "0.0.0.0"
    port: int = 8000
    metrics_port: int = 8002
    admin_port: int = 9901
    picker_port: int = 0
    hold_seconds: int = 0
    body_seconds: int = 120
    most_bytes: int = MAX_BODY_BYTES
    memory_bytes: int = 2**30
    workers: int = 2
    directory: str = "/etc/octavo-router"


def files(spec: RouterSpec, pool: Pool) -> dict[str, str]:
    """All files of the configuration, by name. JSON is YAML."""
    lua = key_lua(spec)
    return {
        "envoy.yaml": _text(bootstrap(spec)),
        "lds.yaml": _text({"version_info": digest([spec.__dict__, lua]), "resources": [listener(spec, pool)]}),
        "cds.yaml": _text({"resources": [cluster(spec, pool)]}),
        "key.lua": lua,
    }


def key_lua(spec: RouterSpec) -> str:
    """The Lua filter, with its settings."""
    headers = ", ".join(json.dumps(name.lower()) for name in spec.session_headers)
    most, every = MAX_BODY_BYTES, int(spec.memory_bytes * _BODIES / spec.workers)
    values = f"{{{headers}}}, {spec.key_bytes}, {most}, {every}, {spec.most_bytes}"
    return f"local SESSION_HEADERS, KEY_BYTES, MOST_BYTES, ALL_BYTES, MODEL_BYTES = {values}\n{_lua()}"


@functools.cache
def _lua() -> str:
    return resources.files(__package__).joinpath("key.lua").read_text()


def bootstrap(spec: RouterSpec) -> Json:
    """Return Envoy's bootstrap, which never changes while it runs. Its admin API listens on loopback alone; another
    listener serves metrics and readiness, and no other path."""
    admin = {"socket_address": {"address": "127.0.0.1", "port_value": spec.admin_port}}
    paths = [{"match": {"path": path}, "route": {"cluster": ADMIN}} for path in ("/stats/prometheus", "/ready")]
    return {
        "node": {"id": "octavo-router", "cluster": "octavo-router"},
        "admin": {"address": admin},
        "overload_manager": _overload_manager(spec),
        "memory_allocator_manager": {"bytes_to_release": 2**27, "memory_release_interval": "1s"},
        "dynamic_resources": {
            f"{kind}_config": {
                "resource_api_version": "V3",
                "path_config_source": {
                    "path": f"{spec.directory}/{kind}.yaml",
                    "watched_directory": {"path": spec.directory},
                },
            }
            for kind in ("lds", "cds")
        },
        "static_resources": {
            "listeners": [
                {
                    "name": "metrics",
                    "address": {"socket_address": {"address": spec.address, "port_value": spec.metrics_port}},
                    # A router that takes no requests for a while is alive: a restart would end its streams.
                    "bypass_overload_manager": True,
                    "filter_chains": [{"filters": [_manager("metrics", _hosts(paths), [_router()])]}],
                }
            ],
            "clusters": [
                {"name": ADMIN, "type": "STATIC", "connect_timeout": "1s", "load_assignment": _at(ADMIN, admin)},
                *([_picker_cluster(spec)] if spec.picker_port else []),
            ],
        },
    }


def _overload_manager(spec: RouterSpec) -> Json:
    """Protect streams before Envoy's memory is full: it takes no new requests and ends the HTTP/2 streams that buffer
    the most megabytes (it ends none of HTTP/1). The Lua filter refuses bodies long before that."""
    heap, monitor = "envoy.resource_monitors.fixed_heap", "envoy.extensions.resource_monitors.fixed_heap.v3"
    config = {
        "@type": f"type.googleapis.com/{monitor}.FixedHeapConfig",
        "max_heap_size_bytes": max(int(spec.memory_bytes * _HEAP), _LEAST_HEAP),
    }

    def action(name: str, **when: Json) -> Json:
        return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": heap, **when}]}

    return {
        "refresh_interval": "0.1s",
        "resource_monitors": [{"name": heap, "typed_config": config}],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},  # streams with less are never ended
        "actions": [
            action("shrink_heap", threshold={"value": 0.6}),
            action("reset_high_memory_stream", scaled={"scaling_threshold": 0.8, "saturation_threshold": 0.95}),
            action("stop_accepting_requests", threshold={"value": 0.95}),
        ],
    }


def listener(spec: RouterSpec, pool: Pool) -> Json:
    """The listener for clients."""
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": pool.name, **to_a_replica()},
        "request_headers_to_remove": list(CALLER_HEADERS),
        **adapter_headers(),
    }
    hosts = _hosts([*(_kept(route) if spec.picker_port else ()), route])
    hosts["virtual_hosts"][0] |= COUNTED
    return client_listener(spec, key_lua(spec), hosts, [])


# Engines are told how often a request was sent: one that was to another before is sent no further for want of an
# adapter, so that a name which nobody has costs a second try and not six.
COUNTED = {"include_request_attempt_count": True, "request_body_buffer_limit": MAX_BODY_BYTES}


def adapter_headers() -> Json:
    """Return the header settings of a route to replicas, so that clients do not see what is between routers and
    engines."""
    return {"response_headers_to_remove": [MISSING]}


def to_a_replica() -> Json:
    """Return the settings of a route to replicas, besides which ones."""
    return {
        "timeout": "0s",  # an answer may take as long as it takes; stream_idle_timeout ends what is silent
        "hash_policy": [{"header": {"header_name": KEY_HEADER}}],
        "retry_policy": _retries(),
    }


def _kept(route: Json) -> list[Json]:
    """Routes, before the one of all, to what replicas keep: the picker is asked with the head, since there need be no
    body."""
    mode = {"request_header_mode": "SEND", "request_body_mode": "NONE"}
    asked = {"@type": f"{_EXTENSION}.ext_proc.v3.ExtProcPerRoute", "overrides": {"processing_mode": mode}}
    get = {"headers": [{"name": ":method", "string_match": {"exact": "GET"}}]}
    matches: list[Json] = [{"safe_regex": {"regex": _KEPT}}, {"safe_regex": {"regex": _LISTS}, **get}]
    return [{**route, "match": one, "typed_per_filter_config": {f"{_FILTER}.ext_proc": asked}} for one in matches]


def client_listener(
    spec: RouterSpec, script: str, routes: Json, filters: list[Json], told: tuple[str, ...] = ()
) -> Json:
    """A listener for clients. `script`: key.lua; `filters` come before it; `told`: headers, to the picker."""
    lua = lua_filter({"filename": f"{spec.directory}/key.lua"})
    picker = [_picker(spec, told), _whole_bodies(), _tried_again()] if spec.picker_port else []
    manager = _manager("clients", routes, [*filters, lua, *picker, _router()])
    manager["typed_config"] |= {
        "stream_idle_timeout": "600s",
        "request_headers_timeout": "30s",
        "request_timeout": f"{spec.body_seconds}s",
        "use_remote_address": True,
        "generate_request_id": False,
        "server_header_transformation": "PASS_THROUGH",
        "local_reply_config": local_replies(spec.body_seconds),
    }
    return {
        "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
        "name": "clients",
        "address": {"socket_address": {"address": spec.address, "port_value": spec.port}},
        # Envoy reads as much before it looks at a head: 40 clients at once would fill the memory with refused bodies.
        "per_connection_buffer_limit_bytes": 2**20,
        # A file that the listener names is read with the listener: another text has to make another listener.
        "metadata": {"filter_metadata": {"octavo": {"key.lua": digest(script)}}},
        "filter_chains": [{"filters": [manager]}],
    }


def lua_filter(source: Json) -> Json:
    """A filter that runs a script."""
    config = {"@type": f"{_EXTENSION}.lua.v3.Lua", "default_source_code": source}
    return {"name": f"{_FILTER}.lua", "typed_config": config}


def cluster(spec: RouterSpec, pool: Pool) -> Json:
    """The replicas, how one is chosen, and when one is left out."""
    seconds = f"{_HEALTH_SECONDS}s"
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": pool.name,
        "cluster_type": {  # every address of a name is a replica
            "name": "envoy.cluster.dns",
            "typed_config": {
                "@type": f"type.googleapis.com/{_DNS}",
                "dns_refresh_rate": "1s",
                "dns_lookup_family": "ALL",
            },
        },
        "connect_timeout": "2s",
        "per_connection_buffer_limit_bytes": MAX_BODY_BYTES,
        "ignore_health_on_host_removal": True,
        "circuit_breakers": {"thresholds": [dict.fromkeys(limits, _MANY)]},
        "load_balancing_policy": _choice(spec),
        "common_lb_config": {
            "healthy_panic_threshold": {"value": 0},
            "ignore_new_hosts_until_first_hc": True,
            "update_merge_window": "0s",  # a dead replica leaves the ring at once, not up to a second later
        },
        "health_checks": [
            {
                "timeout": seconds,
                "interval": seconds,
                "no_traffic_interval": seconds,
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/readyz"},
            }
        ],
        "outlier_detection": _left_out_at_once(),
        "typed_extension_protocol_options": {
            _UPSTREAM: {
                "@type": f"type.googleapis.com/{_UPSTREAM}",
                "explicit_http_config": {"http_protocol_options": {}},
                # Below the 75 s of the engine, or a request may meet a connection that the engine is closing.
                "common_http_protocol_options": {"idle_timeout": "60s"},
            }
        },
        "load_assignment": {
            "cluster_name": pool.name,
            "endpoints": [{"lb_endpoints": [{"endpoint": _endpoint(one)} for one in pool.endpoints]}],
        },
    }


def _choice(spec: RouterSpec) -> Json:
    """The replica that the picker names, else the ring hash with bounded load."""
    ring = _policy(
        "ring_hash",
        "RingHash",
        {
            "minimum_ring_size": 1024,
            "consistent_hashing_lb_config": {"hash_balance_factor": spec.load_factor or LOAD_FACTOR},
        },
    )
    if not spec.picker_port:
        return ring
    sources = [{"metadata": {"key": PICK_SPACE, "path": [{"key": PICK}]}}]
    return _policy("override_host", "OverrideHost", {"override_host_sources": sources, "fallback_policy": ring})


def _policy(name: str, kind: str, config: Json) -> Json:
    full = f"envoy.load_balancing_policies.{name}"
    url = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{name}.v3.{kind}"
    return {"policies": [{"typed_extension_config": {"name": full, "typed_config": {"@type": url, **config}}}]}


def _picker(spec: RouterSpec, headers: tuple[str, ...]) -> Json:
    """The filter that asks the picker: it gets the body of a request, with what it has to know of the head, in one
    message, and sees no answer. When it is dead, slow or wrong, the request goes on without."""
    told = [f"'load-factor={spec.load_factor}'"] if spec.load_factor else []
    names = (KEY_HEADER, *CALLER_HEADERS, *headers)
    asked = _asks_the_picker(
        "BUFFERED", [*map(_header, names), "request.method", "request.url_path", "xds.cluster_name", *told]
    )
    asked["typed_config"] |= {
        "max_message_timeout": f"{spec.hold_seconds + 10}s",  # where the picker asks for it: it holds the request
        "metadata_options": {"receiving_namespaces": {"untyped": [PICK_SPACE]}},
    }
    return asked


def limits_of_tenants() -> Json:
    """The filter that asks the picker, with the head of a request, whether its tenant may begin one. A request counts
    until this filter's stream ends, together with its own."""
    asked = _asks_the_picker("NONE", [*map(_header, CALLER_HEADERS[:2]), f"'{LIMITS}=true'"])
    # Engines send no trailers, but Envoy keeps the stream while some could come.
    asked["typed_config"]["processing_mode"]["response_trailer_mode"] = "SEND"
    return {**asked, "name": f"{_FILTER}.ext_proc.limits"}


def _header(name: str) -> str:
    return f"request.headers['{name}']"


def _asks_the_picker(body: str, attributes: list[str]) -> Json:
    """`attributes`: expressions in CEL; what is told of the router is a constant."""
    return {
        "name": f"{_FILTER}.ext_proc",
        "typed_config": {
            "@type": f"{_EXTENSION}.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": _PICKER}},
            "failure_mode_allow": True,
            "message_timeout": "1s",
            "processing_mode": {
                "request_header_mode": "SEND" if body == "NONE" else "SKIP",
                "request_body_mode": body,
                "request_trailer_mode": "SKIP",
                "response_header_mode": "SKIP",
                "response_body_mode": "NONE",
                "response_trailer_mode": "SKIP",
            },
            "request_attributes": attributes,
        },
    }


def _whole_bodies() -> Json:
    """Stands behind the picker, which is asked once the body is whole: the head waits here for its answer."""
    kind = f"{_EXTENSION}.buffer.v3.Buffer"
    return {"name": f"{_FILTER}.buffer", "typed_config": {"@type": kind, "max_request_bytes": MAX_BODY_BYTES}}


def _tried_again() -> Json:
    """Adds to the route's retries, for one request, what the picker says; without effect where it says nothing. Stands
    where the picker has answered. The router passes none of these headers on."""
    headers = {"x-envoy-max-retries": RETRIES, "x-envoy-retriable-status-codes": RETRIED}
    said = [
        {
            "append": {
                "header": {"key": name, "value": f"%DYNAMIC_METADATA({PICK_SPACE}:{key})%"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        }
        for name, key in headers.items()
    ]
    kind = f"{_EXTENSION}.header_mutation.v3.HeaderMutation"
    config = {"@type": kind, "mutations": {"request_mutations": said}}
    return {"name": f"{_FILTER}.header_mutation", "typed_config": config}


def _picker_cluster(spec: RouterSpec) -> Json:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": spec.picker_port}}
    return {
        "name": _PICKER,
        "type": "STATIC",
        "connect_timeout": "0.25s",
        "circuit_breakers": {"thresholds": [{"max_requests": _MANY, "max_pending_requests": _MANY}]},
        "typed_extension_protocol_options": {
            _UPSTREAM: {
                "@type": f"type.googleapis.com/{_UPSTREAM}",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _at(_PICKER, address),
    }


def _at(cluster: str, address: Json) -> Json:
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}


def _endpoint(one: Endpoint) -> Json:
    return {
        "address": {"socket_address": {"address": one.address, "port_value": one.port}},
        "health_check_config": {"port_value": one.health_port},
    }


def _left_out_at_once() -> Json:
    """A replica that refuses or resets a connection is left out until a health check succeeds. Otherwise a dead one has
    the least load until its health checks have failed, and bounded load sends it all requests of the full others, their
    retries too. Never more than half of all are left out. Answers do not count: a replica that says 500 is there."""
    answers = (
        "consecutive_5xx",
        "consecutive_gateway_failure",
        "success_rate",
        "failure_percentage",
        "local_origin_success_rate",
        "failure_percentage_local_origin",
    )
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 1,
        "interval": "1s",
        "base_ejection_time": "3s",
        "max_ejection_percent": 50,
        **{f"enforcing_{kind}": 0 for kind in answers},
    }


def _retries() -> Json:
    """A replica that refuses, dies before the head of its answer, drains, or lacks an adapter: another one. Not for
    429: the ring has chosen already, and others would only be asked in vain. But the picker asks for it where it has
    held a request: that has room to wait for."""
    return {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes,retriable-headers",
        "retriable_status_codes": [503],
        "retriable_headers": [{"name": MISSING, "present_match": True}],
        # Until the ring without a dead replica has reached all threads, bounded load may choose it again and again.
        "num_retries": 5,
        "retry_back_off": {"base_interval": "0.05s", "max_interval": "1s"},
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        # Each is drawn among all: with few, one request in hundreds would be sent to the same replica again.
        "host_selection_retry_max_attempts": 24,
    }


def _router() -> Json:
    kind = f"{_EXTENSION}.router.v3.Router"
    return {"name": f"{_FILTER}.router", "typed_config": {"@type": kind, "suppress_envoy_headers": True}}


def _hosts(routes: list[Json]) -> Json:
    return {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]}


def _manager(name: str, routes: Json, filters: list[Json]) -> Json:
    config = {"@type": _MANAGER, "stat_prefix": name, "route_config": routes, "http_filters": filters}
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": config}


def _text(value: Json) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
