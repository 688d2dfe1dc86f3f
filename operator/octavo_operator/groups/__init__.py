"""Groups of pods over several nodes: places, endings, and groups that wait for the same nodes."""
