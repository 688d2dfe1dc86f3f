"""An LLMGateway: reconciliation, the links to its models, and the updates that its Envoys reject."""
