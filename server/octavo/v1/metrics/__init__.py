"""vLLM's package of metrics: its names here."""
