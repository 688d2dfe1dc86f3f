"""Anthropic's dialect: the Messages API."""
