"""Tags around a model's reasoning."""

BEGIN, END = "<think>", "</think>"
