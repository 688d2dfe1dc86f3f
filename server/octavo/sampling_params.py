"""vLLM's module of sampling parameters: its names here."""

from __future__ import annotations

from octavo.interface.beam_search import BeamSearchParams as BeamSearchParams
from octavo.interface.sampling_params import RequestOutputKind as RequestOutputKind
from octavo.interface.sampling_params import SamplingParams as SamplingParams
from octavo.interface.structured_output import StructuredOutputsParams as StructuredOutputsParams
