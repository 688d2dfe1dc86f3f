"""What stands around a model's thoughts."""

BEGIN, END = "<think>", "</think>"
