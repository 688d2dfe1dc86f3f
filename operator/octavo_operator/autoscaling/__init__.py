"""Autoscaling on queue depth with nothing else installed.

page.py            a pod's metrics page -> how loaded it is                        pure
decision.py        loads of all pods -> replicas that are needed, and the metric   pure
reader.py          asks the pods, within bounds, and remembers
metrics_api.py     external.metrics.k8s.io/v1beta1 for the API server, JSON for KEDA
front_proxy.py     who asks: the API server's front proxy, and whether its user may
certificate.py     our own, short-lived
registration.py    the APIService and the way to us, kept in step by whoever holds the Lease

Why the metric is what it is stands in decision.py.
"""

from __future__ import annotations

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
METRIC = "octavo_queue_depth"
API_SERVICE = f"{VERSION}.{GROUP}"
