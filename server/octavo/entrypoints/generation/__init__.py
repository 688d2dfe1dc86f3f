"""Requests become generated output here, for every dialect; nothing here imports a dialect's types."""
