"""Steps on a GPU, captured as CUDA graphs and overlapping."""
