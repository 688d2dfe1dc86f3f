"""An LLMDeployment: reconciliation, status, rollouts of models and images, prefetch, routing."""
