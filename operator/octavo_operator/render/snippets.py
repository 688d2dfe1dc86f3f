"""Annotations in which ingress controllers take parts of their own configuration. Pure.

nginx, HAProxy and others put the text of such an annotation into the configuration of the proxy that all namespaces
share: who writes it can read the controller's credentials and other namespaces' traffic. Objects are created with the
operator's rights, so all who may write LLMGateways or LLMDeployments could.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo_operator.config import OperatorConfig

SNIPPET = "SnippetAnnotationNotAllowed"  # reason of a condition


def is_snippet(key: str) -> bool:
    """True if a controller would take its value for configuration: `nginx.ingress.kubernetes.io/server-snippet`,
    `nginx.org/location-snippets`, `haproxy.org/backend-config-snippet`, `haproxy-ingress.github.io/config-backend`.
    The prefix is an option of most controllers, so it does not count."""
    name = key.rpartition("/")[2].lower()
    return "snippet" in name or name.startswith("config-")


def refused(annotations: Mapping[str, str], config: OperatorConfig) -> list[str]:
    """The keys that this operator does not write, sorted."""
    return [] if config.allow_snippet_annotations else sorted(filter(is_snippet, annotations))


def written(annotations: Mapping[str, str], config: OperatorConfig) -> dict[str, str]:
    """The annotations that this operator writes."""
    left_out = refused(annotations, config)
    return {key: value for key, value in annotations.items() if key not in left_out}


def refusal(field: str, annotations: Mapping[str, str], config: OperatorConfig, outcome: str) -> str | None:
    """Return the reason for the status; None if all are written. `field`: of the spec; `outcome`: what becomes of the
    object."""
    keys = refused(annotations, config)
    if not keys:
        return None
    return (
        f"{field}: {', '.join(keys)} would write the configuration of the ingress controller, which all namespaces "
        f"share; remove it, or have the administrator set allowSnippetAnnotations in the operator's chart. {outcome}"
    )


def refused_service(annotations: Mapping[str, str], config: OperatorConfig) -> str | None:
    """Return the same reason for a Service's annotations: HAProxy's controllers read them there, too."""
    return refusal("spec.service.annotations", annotations, config, "The Service is written without it")
