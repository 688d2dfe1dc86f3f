"""The names that ``--quantization`` takes; no torch, as flags are read before it is imported."""

# What any checkpoint of plain weights can be turned into while it is loaded; none: whatever is stored as values.
ONLINE = ("none", "int8")
# Formats of checkpoints, by vLLM's names: they state what the files are found to be anyway.
STORED = ("awq", "gguf")
# Names that choose one of vLLM's kernels for a format.
ALIASES = {"awq_marlin": "awq"}
QUANTIZATIONS = (*ONLINE, *STORED, *ALIASES)
