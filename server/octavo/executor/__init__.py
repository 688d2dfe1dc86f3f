"""Executors: how the engine reaches its workers."""
