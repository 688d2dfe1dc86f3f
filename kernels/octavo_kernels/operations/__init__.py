"""The interface's functions, by kind: each calls its namesake in the backend that serves its tensors."""
