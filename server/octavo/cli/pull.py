"""``octavo pull MODEL``: `octavo fetch`, as people who come from Ollama write it."""

from octavo.cli.fetch import add_arguments, run

__all__ = ["add_arguments", "run"]
