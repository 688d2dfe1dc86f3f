"""vLLM's package of its engine: its names here."""
