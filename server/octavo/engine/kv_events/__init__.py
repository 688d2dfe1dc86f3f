"""KV events: their configuration, messages and the publisher, as vLLM has them."""
