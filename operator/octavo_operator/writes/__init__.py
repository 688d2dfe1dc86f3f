"""Writes: their plan, its application, fields that others hold, what the API server rejects."""
