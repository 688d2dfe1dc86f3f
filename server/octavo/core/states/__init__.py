"""States of recurrent layers: who holds them, which are kept as snapshots, and which of these go first."""
