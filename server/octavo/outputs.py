"""vLLM's module of outputs: its names here."""

from __future__ import annotations

from octavo.interface.outputs import ClassificationOutput as ClassificationOutput
from octavo.interface.outputs import ClassificationRequestOutput as ClassificationRequestOutput
from octavo.interface.outputs import CompletionOutput as CompletionOutput
from octavo.interface.outputs import EmbeddingOutput as EmbeddingOutput
from octavo.interface.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from octavo.interface.outputs import PoolingOutput as PoolingOutput
from octavo.interface.outputs import PoolingRequestOutput as PoolingRequestOutput
from octavo.interface.outputs import RequestOutput as RequestOutput
from octavo.interface.outputs import ScoringOutput as ScoringOutput
from octavo.interface.outputs import ScoringRequestOutput as ScoringRequestOutput
