"""vLLM's module of log-probabilities: its names here."""

from __future__ import annotations

from octavo.interface.outputs import Logprob as Logprob
