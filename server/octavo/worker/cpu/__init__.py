"""Steps on a CPU, replayed from recordings."""
