"""Grammars of structured output: compiled in a confined child process, masks shared with the worker."""
