"""Speculative decoding before the start: its configuration, heads and draft models checked against the target."""
