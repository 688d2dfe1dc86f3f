"""The scheduler and the KV cache manager. Pure: no torch, no I/O, no clock."""
