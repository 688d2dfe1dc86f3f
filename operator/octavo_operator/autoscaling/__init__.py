"""Autoscaling on queue depth without a metrics adapter.

metrics_page.py    a pod's metrics page -> its load                             pure
decision.py        loads of all pods -> replicas needed, and the metric         pure
zero.py            when the first replica starts, and the last ones stop         pure
zero_scaler.py     asks the routers, and writes that
condition.py       the condition AutoscalerReady                                pure
load_reader.py     scrapes the pods, within limits, and keeps the last decisions
metrics_api.py     external.metrics.k8s.io/v1beta1 for the API server, JSON for KEDA
front_proxy.py     authentication of requests by the API server's front proxy, and authorization of their users
certificate.py     the serving certificate
registration.py    the leader's APIService and EndpointSlice

decision.py explains the metric.
"""

from __future__ import annotations

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
API_SERVICE = f"{VERSION}.{GROUP}"
