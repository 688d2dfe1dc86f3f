"""vLLM's module of log-probabilities, where older versions have them: its names here."""

from __future__ import annotations

from octavo.interface.outputs import Logprob as Logprob
from octavo.interface.outputs import RequestMetrics as RequestMetrics
