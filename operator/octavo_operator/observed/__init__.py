"""Observe the cluster: children, pods, their events, why they do not run. Pure but for pod_events."""
