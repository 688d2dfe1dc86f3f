"""The release: used in system_fingerprint, /version and `octavo --version`."""

__version__ = "0.1.0"
