"""``octavo ls``: another name of `octavo list`, as people who come from Ollama write it."""

from octavo.cli.list import add_arguments, run

__all__ = ["add_arguments", "run"]
