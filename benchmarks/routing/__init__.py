"""The router beside others."""
