"""Streaming a checkpoint's tensors into a model's parameters."""
