"""Ollama's API, over the same generation as OpenAI's."""
