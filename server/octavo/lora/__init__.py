"""vLLM's package of adapters: its names here."""
