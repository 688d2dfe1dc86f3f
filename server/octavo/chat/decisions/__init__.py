"""Decisions: questions about an input, answered by the probabilities of labels behind one shared prompt. Pure."""
