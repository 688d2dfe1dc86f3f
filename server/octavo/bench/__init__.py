"""`octavo bench`: load a server, or run the engine offline, and report."""
