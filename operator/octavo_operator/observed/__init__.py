"""What the cluster has: children, pods, their events, why they do not run. Pure but for pod_events."""
