"""Our server beside others on the same machine."""
