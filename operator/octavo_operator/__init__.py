"""The Octavo operator: keeps what an LLMDeployment asks for running, and says honestly how it stands."""

__version__ = "0.2.0"
