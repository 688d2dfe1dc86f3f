"""Speculative decoding on the device: draft models and heads that propose, over the worker's own hidden states."""
