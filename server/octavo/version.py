"""The release: used in system_fingerprint, /version and `octavo --version`."""

__version__ = "0.2.0"
