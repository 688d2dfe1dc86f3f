"""Which operator answers for which deployments, where several run."""
