"""The engine's metrics: Prometheus instruments, request traces and the load line of the log."""
