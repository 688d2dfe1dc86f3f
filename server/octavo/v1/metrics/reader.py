"""vLLM's module of metrics as objects: its names here."""

from __future__ import annotations

from octavo.metrics.reader import Counter as Counter
from octavo.metrics.reader import Gauge as Gauge
from octavo.metrics.reader import Metric as Metric
from octavo.metrics.reader import Vector as Vector
