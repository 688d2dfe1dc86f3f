"""Turning logits into tokens.

`SamplingStates` holds one row a request; `make_metadata` gathers the rows of a step; `Sampler` runs the step:
constraints.py (what may be said at all), penalties.py, truncation.py (top-k, top-p, min-p), gumbel.py (the draw itself,
stateless), logprobs.py. Every row's result depends on that row alone, whatever else is in the batch.
"""

from octavo.sample.logprobs import LogprobsTensors, compute_prompt_logprobs
from octavo.sample.metadata import SamplerOutput, SamplingMetadata
from octavo.sample.sampler import Sampler
from octavo.sample.states import SamplingStates
