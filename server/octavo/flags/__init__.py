"""Command-line flags of the engine's and the server's arguments, vLLM's flags, and YAML files of flags."""
