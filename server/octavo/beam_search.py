"""vLLM's module of beam search: its names here."""

from __future__ import annotations

from octavo.interface.beam_search import BeamSearchOutput as BeamSearchOutput
from octavo.interface.beam_search import BeamSearchSequence as BeamSearchSequence
