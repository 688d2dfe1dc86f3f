"""State that outlives a request: stored responses and conversations."""
