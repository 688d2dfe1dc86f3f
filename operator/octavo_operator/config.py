"""Configuration of the operator, from environment variables that the chart sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo_operator import __version__
from octavo_operator.api.engine import FOLLOW, PINNED
from octavo_operator.api.resources import Accelerator
from octavo_operator.defaults import Defaults

DEFAULT_IMAGE = f"ghcr.io/octavo-dev/octavo-server:{__version__}"
DEFAULT_ROUTER_IMAGE = f"ghcr.io/octavo-dev/octavo-router:{__version__}"


class ConfigError(ValueError):
    """An invalid environment variable; the message names it."""


@dataclass(frozen=True)
class OperatorConfig:
    """Settings of one operator."""

    engine_image: str = DEFAULT_IMAGE  # of specs without engine.image, where defaults have none
    router_image: str = DEFAULT_ROUTER_IMAGE  # of the routers of strategy prefix
    defaults: Defaults = field(default_factory=Defaults)  # of what specs leave empty
    image_pull_secrets: tuple[str, ...] = ()  # of all engine and router pods
    image_policy: str = PINNED  # of specs without engine.image and engine.imagePolicy
    image_rollouts: int = 1  # LLMDeployments of policy Follow that are updated at the same time
    allow_privileged_pods: bool = False  # podPatches and volumes may leave the restricted Pod Security Standard
    allow_snippet_annotations: bool = False  # of Ingresses and Services may hold a controller's configuration
    node_cache_paths: tuple[str, ...] = ()  # folders of nodes that specs may name for model.cache.mode node
    cluster_assigned_ids: bool = False  # the cluster sets uid, gid, fsGroup (OpenShift); a spec may override it
    management_namespaces: tuple[str, ...] = ()  # whose pods may reach the management port
    cluster_domain: str = "cluster.local"
    namespace: str = "default"  # of the operator and its Lease
    watch_namespaces: tuple[str, ...] = ()  # empty: all
    selector: str = ""  # label selector of the LLMDeployments to serve; empty: all
    identity: str = "octavo-operator"  # holder of the Lease
    lease_name: str = "octavo-operator"
    workers: int = 8  # LLMDeployments that are reconciled at the same time
    resync_seconds: float = 300.0  # between complete listings, for events that watches missed
    watch_seconds: float = 70.0  # of silence until a watch is opened again: the API server sends a bookmark every 60
    lease_seconds: float = 15.0
    health_port: int = 8080
    metrics_api: bool = False  # serve external.metrics.k8s.io while an LLMDeployment needs it
    metrics_port: int = 8443
    metrics_service: str = "octavo-operator-metrics"  # the Service in front of the leader; it has no selector
    metrics_owner: str = ""  # the ClusterRole that owns the APIService
    metrics_certificate_seconds: float = 86400.0
    address: str = "127.0.0.1"  # of this pod
    log_level: str = "info"
    log_format: str = "text"

    @property
    def operator_id(self) -> str:
        """Identifies the replicas of this release among other operators: namespace/name of their Lease."""
        return f"{self.namespace}/{self.lease_name}"

    def image(self, accelerator: Accelerator | None) -> str:
        """Image of the engine for specs without engine.image."""
        return self.defaults.image(accelerator) or self.engine_image

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> OperatorConfig:
        """Read the variables OCTAVO_*, POD_NAME, POD_NAMESPACE and POD_IP. Raises ConfigError."""

        def words(name: str) -> tuple[str, ...]:
            return tuple(word.strip() for word in env.get(name, "").split(",") if word.strip())

        def number(name: str, default: float, least: float) -> float:
            try:
                value = float(env.get(name) or default)
            except ValueError:
                raise ConfigError(f"{name} must be a number, got {env[name]!r}") from None
            if value < least:
                raise ConfigError(f"{name} must be at least {least:g}, got {value:g}")
            return value

        log_format = env.get("OCTAVO_LOG_FORMAT") or "text"
        if log_format not in ("text", "json"):
            raise ConfigError(f"OCTAVO_LOG_FORMAT must be text or json, got {log_format!r}")
        log_level = env.get("OCTAVO_LOG_LEVEL") or "info"
        if log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"OCTAVO_LOG_LEVEL must be debug, info, warning or error, got {log_level!r}")
        image_policy = env.get("OCTAVO_IMAGE_POLICY") or PINNED
        if image_policy not in (PINNED, FOLLOW):
            raise ConfigError(f"OCTAVO_IMAGE_POLICY must be {PINNED} or {FOLLOW}, got {image_policy!r}")
        try:
            defaults = Defaults.parse(env.get("OCTAVO_DEFAULTS") or "{}")
        except ValueError as error:
            raise ConfigError(f"OCTAVO_DEFAULTS {error}") from None
        return cls(
            engine_image=env.get("OCTAVO_ENGINE_IMAGE") or DEFAULT_IMAGE,
            router_image=env.get("OCTAVO_ROUTER_IMAGE") or DEFAULT_ROUTER_IMAGE,
            defaults=defaults,
            image_pull_secrets=words("OCTAVO_IMAGE_PULL_SECRETS"),
            image_policy=image_policy,
            image_rollouts=int(number("OCTAVO_IMAGE_ROLLOUTS", 1, 1)),
            allow_privileged_pods=_boolean(env, "OCTAVO_ALLOW_PRIVILEGED_PODS"),
            allow_snippet_annotations=_boolean(env, "OCTAVO_ALLOW_SNIPPET_ANNOTATIONS"),
            node_cache_paths=words("OCTAVO_NODE_CACHE_PATHS"),
            cluster_assigned_ids=_boolean(env, "OCTAVO_CLUSTER_ASSIGNED_IDS"),
            management_namespaces=words("OCTAVO_MANAGEMENT_NAMESPACES"),
            cluster_domain=env.get("OCTAVO_CLUSTER_DOMAIN") or "cluster.local",
            namespace=env.get("POD_NAMESPACE") or "default",
            watch_namespaces=words("OCTAVO_WATCH_NAMESPACES"),
            selector=env.get("OCTAVO_SELECTOR", "").strip(),
            identity=env.get("POD_NAME") or f"octavo-operator-{os.getpid()}",
            lease_name=env.get("OCTAVO_LEASE_NAME") or "octavo-operator",
            workers=int(number("OCTAVO_WORKERS", 8, 1)),
            resync_seconds=number("OCTAVO_RESYNC_SECONDS", 300, 1),
            watch_seconds=number("OCTAVO_WATCH_SECONDS", 70, 1),
            lease_seconds=number("OCTAVO_LEASE_SECONDS", 15, 3),
            health_port=int(number("OCTAVO_HEALTH_PORT", 8080, 1)),
            metrics_api=_boolean(env, "OCTAVO_METRICS_API"),
            metrics_port=int(number("OCTAVO_METRICS_PORT", 8443, 1)),
            metrics_service=env.get("OCTAVO_METRICS_SERVICE") or "octavo-operator-metrics",
            metrics_owner=env.get("OCTAVO_METRICS_OWNER", ""),
            metrics_certificate_seconds=number("OCTAVO_METRICS_CERTIFICATE_SECONDS", 86400, 10),
            address=env.get("POD_IP") or "127.0.0.1",
            log_level=log_level,
            log_format=log_format,
        )


def _boolean(env: Mapping[str, str], name: str) -> bool:
    value = (env.get(name) or "false").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, got {env[name]!r}")
    return value == "true"
